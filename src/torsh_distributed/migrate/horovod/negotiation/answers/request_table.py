"""Which operations all ranks have asked for, and whether they asked for the same; pure, on the first rank of a set.

Ranks may ask in any order. An operation is ready when every rank that has not joined has asked for it by name. If the
requests differ in what must be equal, the operation is ready too: with the difference, which every rank then raises.

Repeated operations come as numbers. Equal numbers are equal requests, so of those the table keeps one bit for each
rank that has asked. A name is either among these marks or among the requests that are compared, never in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torsh_distributed.migrate.horovod.negotiation.answers.response_cache import NumberGiver
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request, RequestFlags

_ZEROS_ARE_FINE = frozenset({OpKind.ALLREDUCE})
"""Operations to which a joined rank can contribute zeros."""
_MAY_DIFFER = frozenset({OpKind.ALLGATHER, OpKind.ALLTOALL})


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
    """The requests of all ranks of one set, by name. Ranks are indices within the set.

    `numbers`: what the numbers stand for that ranks ask with; without, they ask with requests alone.
    """

    def __init__(
        self, num_ranks: int, numbers: NumberGiver | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_ranks = num_ranks
        self._numbers = NumberGiver(0, num_ranks) if numbers is None else numbers
        self._clock = clock
        self._asked: dict[str, _AskedOp] = {}
        self._joined: list[int] = []
        self._ready: list[ReadyOp] = []
        self._marks: dict[int, tuple[int, float]] = {}
        """By number: a bit for each rank that has asked, and when the first did."""
        self._all_bits = (1 << num_ranks) - 1
        self._ready_numbers: list[int] = []

    @property
    def is_waiting(self) -> bool:
        """Whether some operation was asked for by some ranks only."""
        return bool(self._asked) or bool(self._joined) or bool(self._marks)

    def add_all(self, rank: int, asked: Sequence[int | Request]) -> None:
        """Note what a rank asks for in one message, as numbers and requests."""
        now_s, bit, all_bits = self._clock(), 1 << rank, self._all_bits
        marks, ready, given = self._marks, self._ready_numbers, self._numbers.given
        for one in asked:
            if type(one) is not int:
                assert isinstance(one, Request), "the other kind"
                self.add(rank, one)
            elif self._asked or self._joined or one not in given:
                self._add_number(rank, one, now_s)
            else:
                mark = marks.get(one)
                bits = bit if mark is None else mark[0] | bit
                if bits != all_bits:
                    marks[one] = bits, now_s if mark is None else mark[1]
                    continue
                if mark is not None:
                    del marks[one]
                ready.append(one)

    def _add_number(self, rank: int, number: int, now_s: float) -> None:
        """A number while some operations are compared, one of which may have its name."""
        request = self._numbers.asked(number)
        if not self._joined and request.name not in self._asked and number in self._numbers.given:
            bits, since_s = self._marks.get(number, (0, now_s))
            bits |= 1 << rank
            if bits == self._all_bits:
                self._marks.pop(number, None)
                self._ready_numbers.append(number)
            else:
                self._marks[number] = bits, since_s
            return
        self.add(rank, request)

    def withdraw(self, numbers: Iterable[int]) -> None:
        """The numbers stand for nothing from now on: compare what was asked for with them."""
        for number in numbers:
            self._compare(number)

    def _compare(self, number: int) -> None:
        """Go on with the request that a number stands for, if ranks have asked with it."""
        bits, since_s = self._marks.pop(number, (0, 0.0))
        for rank in range(self._num_ranks):
            if bits >> rank & 1:
                self._add(rank, self._numbers.asked(number), since_s)

    def add(self, rank: int, request: Request) -> None:
        """Note what a rank asks for."""
        if self._marks:
            if request.kind == OpKind.JOIN:
                self.withdraw(list(self._marks))  # from here on zeros may complete them
            else:
                number = self._numbers.number_named(request.name)
                if number is not None:
                    self._compare(number)
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
        """The compared operations that became ready since the last call, in order."""
        ready, self._ready = self._ready, []
        return ready

    def take_numbers(self) -> tuple[int, ...]:
        """The repeated operations that became ready since the last call, in order."""
        if not self._ready_numbers:
            return ()
        ready, self._ready_numbers = tuple(self._ready_numbers), []
        return ready

    def stalled(self, after_s: float) -> list[StalledOp]:
        """Operations that ranks have waited for longer than `after_s` since they asked or were last reported."""
        now = self._clock()
        self.withdraw([number for number, (_, since_s) in self._marks.items() if now - since_s >= after_s])
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
        since = [asked.since_s for asked in self._asked.values()] + [mark[1] for mark in self._marks.values()]
        return self._clock() - min(since) if since else 0.0


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
