"""`RpcWorker`: one process that takes calls under a name, and calls others by theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from torsh_distributed.comm.transport.connection_pool import ConnectionPool, ConnectionPoolStats
from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.listener import listen_on_node
from torsh_distributed.errors import InvalidArgument, TorshError, translate_errors
from torsh_distributed.rpc.calling.connecting import listen_on_network, open_lanes
from torsh_distributed.rpc.calling.link import Link, PendingCall
from torsh_distributed.rpc.calling.remote_future import RemoteFuture, RemoteStream
from torsh_distributed.rpc.directory import WorkerDirectory, WorkerInfo
from torsh_distributed.rpc.graceful_end import GracefulEnd
from torsh_distributed.rpc.messages.lane_pair import CALL, REMOTE, STREAM
from torsh_distributed.rpc.references import HeldReferences, ObjectTable, RRef
from torsh_distributed.rpc.serving.call_server import CallServer
from torsh_distributed.rpc.serving.exposed import TABLE, Exposed, ExposeOptions
from torsh_distributed.rpc.serving.served_call import ServedCall, current_call

Target = str | tuple[str, str] | Callable[..., Any]
"""An exposed function, its name, or the key of an object and a method."""
To = str | int | WorkerInfo
"""A worker: its name, its number, or what `worker_info` returns."""
DEFAULT_TIMEOUT_S = 60.0
_KEEP_ALIVE_S = 300.0
_CHECK_IDLE_S = 1.0
"""A link that was not used for so long is looked at before it is used: its peer may have been started again."""
_CLOSE_S = 2.0


class RpcWorker:
    """Takes calls until it is closed. Any thread."""

    def __init__(
        self,
        name: str,
        store: dist.Store,
        *,
        rank: int | None = None,
        host: str | None = None,
        num_threads: int = 16,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        lease_s: float = 30.0,
        most_payload_bytes: int = 1 << 32,
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """See `rpc.start`. `objects` are offered by their keys, to `call(name, (key, method))`, while it lives."""
        if not name or name.startswith("@"):
            raise InvalidArgument("a worker's name is a text that does not begin with @", name=name)
        self.name = name
        self.timeout_s = timeout_s
        self.objects = ObjectTable(name, lease_s, offered=objects or {})
        self.is_closed = False
        self.num_expected: int | None = None
        """How many workers the job was started with, if that is known."""
        self._lease_s = lease_s
        self._most_payload_bytes = most_payload_bytes
        self.directory = WorkerDirectory(store)
        """Who is there, and what workers write down for each other."""
        self._secret = self.directory.secret()
        self._lock = threading.Lock()
        self._held = HeldReferences()
        self._names_by_id: dict[int, str] = {}
        self._num_remote = 0
        self._end = GracefulEnd()
        self._loop = EventLoop("rpc-replies")
        inline: list[Callable[..., Any]] = [self.fetch, self.renew, self.release, self.echo, *self._end.functions()]
        self._internal = {
            f"@{function.__name__}": Exposed(f"@{function.__name__}", function, ExposeOptions(inline=True))
            for function in inline
        }
        unix, tcp = listen_on_node("rpc"), listen_on_network(host)
        self._server = CallServer(
            [unix, *([] if tcp is None else [tcp])],
            self._secret,
            targets=self,
            registry=self,
            num_threads=num_threads,
            most_payload_bytes=most_payload_bytes,
        )
        self._links: ConnectionPool[Link] = ConnectionPool(self._connect, keep_alive_s=_KEEP_ALIVE_S)
        try:
            tcp_address = None if tcp is None else tcp.getsockname()[:2]
            self.info = self.directory.add(name, unix.getsockname().decode(), tcp_address, rank)
        except BaseException:
            self._stop()
            raise
        self._is_listed = True
        self._keep_house_later()

    # Calling

    def call(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """See `rpc.call`."""
        link, pending = self._begin(CALL, to, function, args, kwargs, timeout_s)
        return link.wait(pending)

    def call_async(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RemoteFuture:
        """See `rpc.call_async`."""
        link, pending = self._begin(CALL, to, function, args, kwargs, timeout_s)
        return RemoteFuture(link, pending, self._loop)

    def call_all(
        self,
        names: Iterable[To],
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """See `rpc.call_all`."""
        args = tuple(args)
        results: dict[str, Any] = {}
        for name in map(self._name_of, names):
            try:
                results[name] = self.call_async(name, function, args, kwargs, timeout_s=timeout_s)
            except TorshError as error:
                results[name] = error
        for name, future in results.items():
            if isinstance(future, RemoteFuture):
                problem = future.exception()
                results[name] = future.result() if problem is None else problem
        return results

    def stream(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RemoteStream:
        """See `rpc.stream`."""
        link, pending = self._begin(STREAM, to, function, args, kwargs, timeout_s)
        return RemoteStream(link, pending)

    def remote(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RRef:
        """See `rpc.remote`."""
        owner = self._name_of(to)
        with self._lock:
            self._num_remote += 1
            key = f"{self.name}/{self.info.pid}/{self._num_remote}@{owner}"
        link, pending = self._begin(REMOTE, owner, function, args, kwargs, timeout_s, key)
        return RRef.to(self, owner, key, RemoteFuture(link, pending, self._loop))

    def ping(self, to: To, *, timeout_s: float | None = None) -> float:
        """See `rpc.ping`."""
        start_s = time.perf_counter()
        self.call(to, "@echo", (0,), timeout_s=timeout_s)
        return time.perf_counter() - start_s

    def _begin(
        self,
        kind: int,
        to: To,
        function: Target,
        args: Iterable[Any],
        kwargs: dict[str, Any] | None,
        timeout_s: float | None,
        *rest: Any,
    ) -> tuple[Link, PendingCall]:
        if callable(function):
            function = TABLE.name_of(function)
        serving = current_call()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if serving is not None and timeout_s is None:
            limit_s = min(limit_s, serving.remaining_s)
        pending = PendingCall(function if isinstance(function, str) else function[1], time.monotonic() + limit_s)
        if kind == STREAM:
            pending.expect_items()
        link = self._link(to if isinstance(to, str) else self._name_of(to))
        link.begin(kind, function, list(args), kwargs or {}, pending, *rest)
        return link, pending

    def _link(self, name: str) -> Link:
        link = self._links.get(name)
        if time.monotonic() - link.last_used_s > _CHECK_IDLE_S:
            link.poll()
            link = self._links.get(name)
        return link

    def _connect(self, name: str) -> Link:
        pair = open_lanes(
            self.directory.find(name), self._secret, self.name, self._loop, most_payload_bytes=self._most_payload_bytes
        )
        return Link(name, pair, self)

    # Who is there

    def _name_of(self, to: To) -> str:
        if isinstance(to, WorkerInfo):
            return to.name
        if isinstance(to, str):
            return to
        if to not in self._names_by_id:
            self._names_by_id = {info.id: info.name for info in self.workers()}
        if to not in self._names_by_id:
            raise InvalidArgument("there is no worker with this number", id=to, workers=str(self._names_by_id))
        return self._names_by_id[to]

    def find(self, to: To) -> WorkerInfo:
        """Where a worker is."""
        return self.directory.find(self._name_of(to))

    def workers(self) -> list[WorkerInfo]:
        """All that are there now."""
        return self.directory.workers()

    def wait_for(self, names: Iterable[str], *, timeout_s: float | None = None) -> None:
        """See `rpc.wait_for_workers`."""
        wanted = list(names)
        with translate_errors("wait_for_workers", workers=", ".join(wanted)):
            self.directory.wait(wanted, self.timeout_s if timeout_s is None else timeout_s)

    def meet(self, what: str, num_workers: int, *, timeout_s: float | None = None) -> None:
        """Until as many workers have come to the same point."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with translate_errors(f"rpc {what}", num_workers=num_workers):
            self.directory.meet(what, num_workers, limit_s)

    def leave_together(self, num_workers: int, timeout_s: float) -> None:
        """Until as many workers have come to their end, and none needs the store any more that worker 0 may host."""
        self._end.wait(self, num_workers, timeout_s)
        self._unlist()
        with translate_errors("rpc end", num_workers=num_workers):
            # All have agreed to leave, so this takes no time of its own.
            self.directory.meet("left", num_workers, min(timeout_s, DEFAULT_TIMEOUT_S), waits=self.info.id == 0)

    def settle_calls(self) -> None:
        """Until all calls of this worker have ended, in whatever way."""
        for link in self._links.connections():
            link.settle_all()

    def connections(self) -> ConnectionPoolStats:
        """The links to other workers."""
        return self._links.stats()

    # What calls mean here: see `CallTargets`

    def resolve(self, target: Any) -> tuple[Exposed, Callable[..., Any]]:
        """An exposed function, or a public method of an object."""
        if isinstance(target, str):
            exposed = self._internal.get(target) if target.startswith("@") else TABLE.find(target)
            if exposed is not None:
                return exposed, exposed.function
            raise InvalidArgument("no function of this name is exposed there", hint=TABLE.unknown(target), name=target)
        if not isinstance(target, list | tuple) or len(target) != 2 or not isinstance(target[1], str):
            raise InvalidArgument("a target is a name, or an object and a method", target=str(target)[:100])
        made = self.objects.get(target[0])
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
        place = self.objects.expect(rest[0], call.caller)
        call.keep = place.set_result
        call.on_error = place.set_exception
        return True

    # What values may be, beyond plain ones: see `ValueRegistry`

    name_of_value = staticmethod(TABLE.name_of_value)
    value_class = staticmethod(TABLE.value_class)
    name_of_function = staticmethod(TABLE.name_of_function)
    function = staticmethod(TABLE.function)

    def pack_reference(self, value: Any) -> list[Any] | None:
        """A reference that is given away is kept here for a lease, in which the taker begins to renew it."""
        if not isinstance(value, RRef):
            return None
        value.wait_until_created()
        self._held.give(value, time.monotonic() + self._lease_s)
        return [value.owner_name(), value.key]

    def open_reference(self, packed: list[Any]) -> RRef:
        """A reference that was given to us."""
        owner, key = packed
        return RRef.to(self, str(owner), str(key))

    # References

    def holds(self, owner: str, key: str) -> None:
        """This process has one more reference to an object."""
        self._held.add(owner, key)

    def let_go(self, owner: str, key: str) -> None:
        """One reference less; with the last one the owner is told."""
        if self._held.remove(owner, key) and not self.is_closed:
            # On another thread: this one may be in the middle of anything when a reference is collected.
            self._server.threads.submit(lambda: self._tell_owner(owner, "@release", key))

    def _tell_owner(self, owner: str, function: str, argument: Any) -> None:
        if owner == self.name:
            self._internal[function].function(argument)
            return
        try:
            with translate_errors(function):
                self.call(owner, function, (argument,), timeout_s=self._lease_s)
        except TorshError:
            return  # the owner is gone, and the object with it; or this worker is

    def fetch(self, key: str) -> Future[Any]:
        """The object itself, for a holder."""
        return self.objects.get(key)

    def renew(self, keys: list[str]) -> None:
        """A holder still has these."""
        self.objects.renew(keys, self._caller())

    def release(self, key: str) -> None:
        """A holder gives one up."""
        self.objects.release(key, self._caller())

    def echo(self, value: Any) -> Any:
        """What was sent."""
        return value

    def _caller(self) -> str:
        call = current_call()
        return self.name if call is None else call.caller

    def _keep_house_later(self) -> None:
        self._loop.call_at(time.monotonic() + self._lease_s / 3, self._keep_house_soon)

    def _keep_house_soon(self) -> None:
        """On the loop, which must not wait for owners."""
        self._server.threads.submit(self._keep_house)
        self._keep_house_later()

    def _keep_house(self) -> None:
        """Renew what this process holds; forget what nobody holds, and connections that nobody uses."""
        self._held.forget_given(time.monotonic())
        for owner, keys in self._held.by_owner().items():
            self._tell_owner(owner, "@renew", keys)
        self.objects.drop_expired()
        self._links.close_idle()
        for link in self._links.connections():
            link.drop_idle()
        self._server.drop_idle()

    # The end

    def close(self) -> None:
        """Leave: calls under way fail here and at their callers."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        try:
            self._unlist()
        finally:
            self._stop()

    def _unlist(self) -> None:
        if self._is_listed:
            self._is_listed = False
            self.directory.remove(self.info)

    def _stop(self) -> None:
        self.is_closed = True
        self._links.close()
        self._server.close(_CLOSE_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
