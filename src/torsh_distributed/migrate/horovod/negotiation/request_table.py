"""Which operations all ranks have asked for, and whether they asked for the same; pure, on the first rank of a set.

Ranks may ask in any order. An operation is ready when every rank that has not joined has asked for it by name. If the
requests differ in what must be equal, the operation is ready too: with the difference, which every rank then raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request, RequestFlags

_ZEROS_ARE_FINE = frozenset({OpKind.ALLREDUCE})
"""Operations to which a joined rank can contribute zeros."""
_MAY_DIFFER = frozenset({OpKind.ALLGATHER, OpKind.ALLTOALL})
_EQUAL_OR_WRONG = frozenset({OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCESCATTER, OpKind.ADASUM, OpKind.AVERAGED})
"""Operations whose requests are equal on all ranks unless somebody made a mistake."""


class ReadyOp(NamedTuple):
    """An operation that every rank asked for."""

    request: Request
    error: str = ""
    """Why the ranks cannot carry it out; empty if they can."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """By rank of the set. allgather: rows of each tensor; alltoall: rows for each rank; join: the last rank."""
    joined: tuple[int, ...] = ()
    """Ranks of the set that contribute zeros."""


class StalledOp(NamedTuple):
    """An operation that some ranks have waited for, and others have not asked for."""

    name: str
    waited_s: float
    missing: tuple[int, ...]


class _AskedOp:
    __slots__ = ("differs", "first", "ranks", "since_s", "warned_s")

    def __init__(self, first: Request, since_s: float) -> None:
        self.first = first
        self.since_s = since_s
        self.warned_s = since_s
        self.ranks: dict[int, Request] = {}
        self.differs = False


class RequestTable:
    """The requests of all ranks of one set, by name. Ranks are indices within the set."""

    def __init__(self, num_ranks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._asked: dict[str, _AskedOp] = {}
        self._joined: list[int] = []
        self._ready: list[ReadyOp] = []
        self._held: dict[int, list[Request]] = {}
        """Requests that came together while nothing waited, by rank: the same ones from all ranks are ready at once."""
        self._held_since_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether some operation was asked for by some ranks only."""
        return bool(self._asked) or bool(self._joined) or bool(self._held)

    def add_all(self, rank: int, requests: list[Request]) -> None:
        """Note what a rank asks for in one message; the same result as `add` for each of them, in less time.

        Ranks that do the same at every step send the same messages: one comparison then settles all operations.
        """
        if len(requests) == 1 or self._asked or self._joined or not self._is_held_alike(rank, requests):
            for request in requests:
                self.add(rank, request)
            return
        if not self._held:
            self._held_since_s = self._clock()
        self._held[rank] = requests
        if len(self._held) == self._num_ranks:
            self._held.clear()
            self._ready += map(ReadyOp, requests)

    def _is_held_alike(self, rank: int, requests: list[Request]) -> bool:
        if not self._held:
            return all(request.kind in _EQUAL_OR_WRONG for request in requests)
        return rank not in self._held and requests == next(iter(self._held.values()))

    def _take_apart(self) -> None:
        """Look at each of the requests that were held: the ranks did not ask for the same."""
        held, self._held = self._held, {}
        for rank, requests in held.items():
            for request in requests:
                self._add(rank, request, self._held_since_s)

    def add(self, rank: int, request: Request) -> None:
        """Note what a rank asks for."""
        if self._held:
            self._take_apart()
        self._add(rank, request, None)

    def _add(self, rank: int, request: Request, since_s: float | None) -> None:
        if request.kind == OpKind.JOIN:
            self._join(rank, request)
            return
        asked = self._asked.get(request.name)
        if asked is None:
            asked = self._asked[request.name] = _AskedOp(request, self._clock() if since_s is None else since_s)
        elif request is not asked.first and request != asked.first:
            asked.differs = True
        asked.ranks[rank] = request
        if self._is_complete(asked):
            self._settle(asked)

    def _is_complete(self, asked: _AskedOp) -> bool:
        if not self._joined:
            return len(asked.ranks) == self._num_ranks
        return len(asked.ranks.keys() | self._joined) == self._num_ranks

    def _join(self, rank: int, request: Request) -> None:
        self._joined.append(rank)
        if len(self._joined) == self._num_ranks:
            self._ready.append(ReadyOp(request, sizes=((rank,),)))
            self._joined.clear()
            return
        for asked in list(self._asked.values()):
            if self._is_complete(asked):
                self._settle(asked)

    def _settle(self, asked: _AskedOp) -> None:
        del self._asked[asked.first.name]
        request, joined = asked.first, tuple(sorted(set(self._joined) - asked.ranks.keys()))
        error = difference(asked.ranks) if asked.differs else ""
        if not error and joined and request.kind not in _ZEROS_ARE_FINE:
            error = (
                f"{request.name} cannot run while rank {joined[0]} has joined: "
                "only allreduce has a meaning for ranks without data"
            )
        elif not error and joined and request.op == "Adasum":
            error = f"{request.name}: Adasum has no meaning while rank {joined[0]} has joined"
        sizes: tuple[tuple[int, ...], ...] = ()
        if not error and request.kind in _MAY_DIFFER:
            sizes = tuple(_rows(asked.ranks[rank]) for rank in sorted(asked.ranks))
        self._ready.append(ReadyOp(request, error=error, sizes=sizes, joined=joined))

    def take_ready(self) -> list[ReadyOp]:
        """The operations that became ready since the last call, in order."""
        ready, self._ready = self._ready, []
        return ready

    def stalled(self, after_s: float) -> list[StalledOp]:
        """Operations that ranks have waited for longer than `after_s` since they asked or were last reported."""
        now = self._clock()
        if self._held and now - self._held_since_s >= after_s:
            self._take_apart()
        found = []
        for asked in self._asked.values():
            if now - asked.warned_s >= after_s:
                asked.warned_s = now
                present = {*asked.ranks, *self._joined}
                missing = tuple(rank for rank in range(self._num_ranks) if rank not in present)
                found.append(StalledOp(asked.first.name, now - asked.since_s, missing))
        return found

    def longest_wait_s(self) -> float:
        """How long the oldest operation has waited; 0 without one."""
        if self._held:
            self._take_apart()
        return max((self._clock() - asked.since_s for asked in self._asked.values()), default=0.0)


def _rows(request: Request) -> tuple[int, ...]:
    if request.kind == OpKind.ALLTOALL:
        return request.splits
    return tuple(shape[0] for _, shape in request.tensors)


def difference(requests: dict[int, Request]) -> str:
    """What two ranks do not agree on, in words; empty if they differ only where they may."""
    ranks = sorted(requests)
    first_rank, first = ranks[0], requests[ranks[0]]
    for rank in ranks[1:]:
        theirs = requests[rank]
        for what, ours, other in _compared(first, theirs):
            if ours != other:
                return f"{first.name}: mismatched {what}: rank {first_rank} has {ours}, rank {rank} has {other}"
    return ""


def _compared(first: Request, other: Request) -> list[tuple[str, object, object]]:
    has_free_rows = first.kind in _MAY_DIFFER
    pairs: list[tuple[str, object, object]] = [
        ("operations", first.kind, other.kind),
        ("devices", first.device, other.device),
        ("numbers of tensors", len(first.tensors), len(other.tensors)),
        ("data types", [dtype for dtype, _ in first.tensors], [dtype for dtype, _ in other.tensors]),
    ]
    if has_free_rows:
        pairs += [
            ("numbers of dims", _num_dims(first), _num_dims(other)),
            ("shapes beyond the first dim", _row_shapes(first), _row_shapes(other)),
        ]
    else:
        pairs += [
            ("shapes", [shape for _, shape in first.tensors], [shape for _, shape in other.tensors]),
            ("parameters" if first.kind != OpKind.PROCESS_SET else "ranks", first.splits, other.splits),
        ]
    return [
        *pairs,
        ("reductions", first.op, other.op),
        ("root ranks", first.root, other.root),
        ("prescale factors", first.prescale, other.prescale),
        ("postscale factors", first.postscale, other.postscale),
        ("ways to reduce", RequestFlags(first.flags), RequestFlags(other.flags)),
    ]


def _num_dims(request: Request) -> list[int]:
    return [len(shape) for _, shape in request.tensors]


def _row_shapes(request: Request) -> list[tuple[int, ...]]:
    return [shape[1:] for _, shape in request.tensors]
