"""Which operations all ranks have asked for, and whether they asked for the same; pure, on the first rank of a set.

Ranks may ask in any order. An operation is ready when every rank that has not joined has asked for it by name. If the
requests differ in what must be equal, the operation is ready too: with the difference, which every rank then raises.

Repeated operations come as numbers. Equal numbers are equal requests, so of those the table keeps one bit for each
rank that has asked. A name is either among these marks or among the requests that are compared, never in both.

The cache numbers the operations that ranks repeat at every step, so a request is one number and an answer another.
The first rank of a set gives an operation its number when all ranks have asked for the same, and tells everyone with
the answer. It forgets the operation that was used longest ago when there are too many. A rank may still send a number
that was just forgotten: it is kept until every rank has said that it has seen the answer in which it was withdrawn.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request, RequestFlags


class RequestNumbers:
    """The numbers that a rank knows, in both directions."""

    def __init__(self) -> None:
        self._numbers: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}
        self._repeated: dict[str, tuple[Request, int]] = {}
        """By name: the object that was asked for last, and its number. A repeated call brings the same object, which is
        found out without hashing all of it."""

    def number_of(self, request: Request) -> int | None:
        """The number of a request, if it has one."""
        repeated = self._repeated.get(request.name)
        if repeated is not None and repeated[0] is request:
            return repeated[1]
        number = self._numbers.get(request)
        if number is not None:
            self._repeated[request.name] = request, number
        return number

    def request_of(self, number: int) -> Request:
        """The request with that number."""
        return self._requests[number]

    def learn(self, number: int, request: Request) -> None:
        """Note what a number stands for."""
        self._numbers[request] = number
        self._requests[number] = request

    def forget(self, number: int) -> None:
        """Stop using a number."""
        request = self._requests.pop(number, None)
        if request is not None:
            self._numbers.pop(request, None)
            self._repeated.pop(request.name, None)


class NumberGiver(RequestNumbers):
    """The numbers as the first rank gives them: at most `capacity` at a time, and one for each name."""

    def __init__(self, capacity: int, num_ranks: int) -> None:
        super().__init__()
        self._capacity = capacity
        self.given: OrderedDict[int, None] = OrderedDict()
        """The numbers that stand for something, the one used longest ago first."""
        self._by_name: dict[str, int] = {}
        self._next = 0
        self._withdrawn: deque[tuple[int, int]] = deque()
        self._late: dict[int, Request] = {}
        self._seen = [0] * num_ranks

    def give(self, request: Request, answer: int) -> tuple[int | None, list[int]]:
        """A number for a request answered in `answer`, None if none are given; and the numbers withdrawn with it."""
        if self._capacity <= 0:
            return None, []
        withdrawn = []
        same_name = self._by_name.get(request.name)
        if same_name is not None:
            withdrawn.append(same_name)
            self._withdraw(same_name, answer)
        while len(self.given) >= self._capacity:
            oldest = next(iter(self.given))
            withdrawn.append(oldest)
            self._withdraw(oldest, answer)
        number, self._next = self._next, self._next + 1
        self.learn(number, request)
        self._by_name[request.name] = number
        self.given[number] = None
        return number, withdrawn

    def _withdraw(self, number: int, answer: int) -> None:
        request = self._requests[number]
        self._withdrawn.append((answer, number))
        self._late[number] = request
        del self._by_name[request.name], self.given[number]
        self.forget(number)

    def use(self, numbers: Iterable[int]) -> None:
        """Note that operations were repeated."""
        touch = self.given.move_to_end
        for number in numbers:
            touch(number)

    def number_named(self, name: str) -> int | None:
        """The number that is given for a name, whatever was asked for under it."""
        return self._by_name.get(name)

    def asked(self, number: int) -> Request:
        """The request that a rank means, with numbers it did not know to be withdrawn."""
        request = self._requests.get(number)
        return self._late[number] if request is None else request

    def has_seen(self, rank: int, answer: int) -> None:
        """A rank has received all answers up to `answer`: it no longer sends what they withdrew."""
        self._seen[rank] = answer
        if self._withdrawn:
            oldest = min(self._seen)
            while self._withdrawn and self._withdrawn[0][0] <= oldest:
                self._late.pop(self._withdrawn.popleft()[1], None)


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
