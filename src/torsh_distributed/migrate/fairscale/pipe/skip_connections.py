"""FairScale's skip connections: a layer stashes a tensor, a later one pops it, past the stages in between.

A layer's `forward` is a generator that yields what it stashes and pops, and returns its output. Inside a Pipe each
microbatch has a shelf of its own; a stage that backward recomputes finds what it popped the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

from torch import Tensor, nn
from typing_extensions import override


@dataclass(frozen=True)
class StashCall:
    """`yield stash(name, tensor)`: keep a tensor for a later layer."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True)
class PopCall:
    """`tensor = yield pop(name)`: take what an earlier layer has kept."""

    name: str


class SkipNamespace:
    """Keeps the names of one pair of layers apart from the same names of another."""


@dataclass
class SkipShelf:
    """What the layers of one microbatch have stashed, and what each has popped."""

    stashed: dict[tuple[object, str], Tensor | None] = field(default_factory=dict)
    popped: dict[tuple[int, str], Tensor | None] = field(default_factory=dict)
    keeps_popped: bool = True
    """Whether a second forward may ask again."""


_shelf: ContextVar[SkipShelf | None] = ContextVar("fairscale_skip_shelf", default=None)
_is_again: ContextVar[bool] = ContextVar("fairscale_skip_again", default=False)


@contextmanager
def using_shelf(shelf: SkipShelf, *, is_again: bool = False) -> Iterator[None]:
    """Inside, layers stash to and pop from `shelf`; `is_again`: a forward that backward runs a second time."""
    shelf_token, again_token = _shelf.set(shelf), _is_again.set(is_again)
    try:
        yield
    finally:
        _shelf.reset(shelf_token)
        _is_again.reset(again_token)


class Skippable(nn.Module):
    """A layer that stashes or pops. Made by `skippable`, with the layer inside as `module`."""

    module_cls: type[nn.Module]
    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self._namespaces: dict[str, object] = {}

    def isolate(self, ns: SkipNamespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Use `ns` for these names, by default for all; returns the layer."""
        for name in self.stashable_names | self.poppable_names if only is None else only:
            self._namespaces[name] = ns
        return self

    def stashable(self) -> list[tuple[object, str]]:
        """What it stashes: namespace and name."""
        return [(self._namespaces.get(name), name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[tuple[object, str]]:
        """What it pops."""
        return [(self._namespaces.get(name), name) for name in sorted(self.poppable_names)]

    @override
    def forward(self, input: Any) -> Any:
        output = self.module(input)
        if not isinstance(output, GeneratorType):
            return output
        shelf = _shelf.get()
        if shelf is None:  # in a plain nn.Sequential: until the pair has met
            shelf = SkipShelf(keeps_popped=False)
            _shelf.set(shelf)
        answer: Tensor | None = None
        while True:
            try:
                call = output.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._answer(call, shelf, input)

    def _answer(self, call: Any, shelf: SkipShelf, input: Any) -> Tensor | None:
        if isinstance(call, StashCall):
            if call.name not in self.stashable_names:
                raise RuntimeError(f"'{call.name}' has not been declared as stashable")
            if not _is_again.get():
                shelf.stashed[self._namespaces.get(call.name), call.name] = call.tensor
            return None
        if not isinstance(call, PopCall):
            raise TypeError(f"{call!r} is not a command from @skippable")
        if call.name not in self.poppable_names:
            raise RuntimeError(f"'{call.name}' has not been declared as poppable")
        place = (id(self), call.name)
        if not _is_again.get():
            value = shelf.stashed.pop((self._namespaces.get(call.name), call.name))
            first = input if isinstance(input, Tensor) else input[0]
            shelf.popped[place] = None if value is None else value.to(first.device, non_blocking=True)
        kept = shelf.popped[place]
        if not shelf.keeps_popped:
            del shelf.popped[place]
        return kept


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a layer's class whose `forward` yields `stash(…)` or `pop(…)`; both are declared here."""
    stashed, popped = frozenset(stash), frozenset(pop)

    def wrap(module_cls: type[nn.Module]) -> type[Skippable]:
        body = {"module_cls": module_cls, "stashable_names": stashed, "poppable_names": popped}
        return type(module_cls.__name__, (Skippable,), body)

    return wrap


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError unless everything stashed is popped once, by a later layer."""
    stashed: set[tuple[object, str]] = set()
    popped: set[tuple[object, str]] = set()
    problems: list[str] = []
    for index, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        for key in layer.poppable():
            if key not in stashed:
                problems.append(f"no module declared '{key[1]}' as stashable before '{index}', which pops it")
            elif key in popped:
                problems.append(f"'{index}' pops '{key[1]}', which was popped already")
            popped.add(key)
        for key in layer.stashable():
            if key in stashed:
                problems.append(f"'{index}' redeclared '{key[1]}' as stashable")
            stashed.add(key)
    problems += _unpopped(stashed - popped)
    if problems:
        raise TypeError(
            "one or more pairs of stash and pop do not match:\n" + "\n".join(f"* {one}" for one in problems)
        )


def _unpopped(keys: Iterable[tuple[object, str]]) -> Sequence[str]:
    return [f"no module declared '{name}' as poppable but stashed" for _, name in sorted(keys, key=lambda key: key[1])]
