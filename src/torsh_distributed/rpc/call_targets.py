"""What calls mean at a worker: exposed functions, methods of its objects, and what workers ask of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc.messages.lane_pair import REMOTE
from torsh_distributed.rpc.references.object_table import ObjectTable
from torsh_distributed.rpc.serving.exposed import TABLE, Exposed, ExposeOptions
from torsh_distributed.rpc.serving.served_call import ServedCall, current_call


class WorkerTargets:
    """The `CallTargets` of a worker with these objects."""

    def __init__(self, objects: ObjectTable, further: Iterable[Callable[..., Any]]) -> None:
        """`further` are functions that other workers call by `@` and their names; they must not wait."""
        self._objects = objects
        internal: list[Callable[..., Any]] = [self.fetch, self.renew, self.release, self.echo, *further]
        self._internal = {
            f"@{function.__name__}": Exposed(f"@{function.__name__}", function, ExposeOptions(inline=True))
            for function in internal
        }

    def resolve(self, target: Any) -> tuple[Exposed, Callable[..., Any]]:
        """An exposed function, or a public method of an object."""
        if isinstance(target, str):
            exposed = self._internal.get(target) if target.startswith("@") else TABLE.find(target)
            if exposed is not None:
                return exposed, exposed.function
            raise InvalidArgument("no function of this name is exposed there", hint=TABLE.unknown(target), name=target)
        if not isinstance(target, list | tuple) or len(target) != 2 or not isinstance(target[1], str):
            raise InvalidArgument("a target is a name, or an object and a method", target=str(target)[:100])
        made = self._objects.get(target[0])
        if not made.done():
            raise InvalidArgument("the object is still being made", hint="wait for it", key=target[0])
        value, method = made.result(), target[1]
        exposed = TABLE.method_of(value, method)
        if exposed is None:
            raise InvalidArgument(
                "the object has no exposed method of this name",
                hint="put @rpc.expose above its class; names with an underscore are private",
                method=method,
                type=type(value).__name__,
            )
        return exposed, getattr(value, method)

    def prepare(self, call: ServedCall, kind: int, args: list[Any], rest: list[Any]) -> bool:
        """Before a call runs: a result that stays here gets its place."""
        if kind != REMOTE:
            return True
        if len(rest) != 1 or not isinstance(rest[0], str):
            raise InvalidArgument("a reference needs a key")
        place = self._objects.expect(rest[0], call.caller)
        call.keep = place.set_result
        call.on_error = place.set_exception
        return True

    # What other workers call

    def fetch(self, key: str) -> Future[Any]:
        """The object itself, for a holder."""
        return self._objects.get(key)

    def renew(self, keys: list[str]) -> None:
        """A holder still has these."""
        self._objects.renew(keys, _caller())

    def release(self, key: str) -> None:
        """A holder gives one up."""
        self._objects.release(key, _caller())

    def echo(self, value: Any) -> Any:
        """What was sent."""
        return value


def _caller() -> str:
    call = current_call()
    assert call is not None, "only other workers call these"
    return call.caller
