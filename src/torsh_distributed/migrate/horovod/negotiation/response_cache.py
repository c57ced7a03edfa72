"""Numbers for operations that ranks repeat at every step, so a request is one number and an answer another; pure.

The first rank of a set gives an operation its number when all ranks have asked for the same, and tells everyone with
the answer. It forgets the operation that was used longest ago when there are too many. A rank may still send a number
that was just forgotten: it is kept until every rank has said that it has seen the answer in which it was withdrawn.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from torsh_distributed.migrate.horovod.negotiation.request import Request


class RequestNumbers:
    """The numbers that a rank knows, in both directions."""

    def __init__(self) -> None:
        self._numbers: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}

    def number_of(self, request: Request) -> int | None:
        """The number of a request, if it has one."""
        return self._numbers.get(request)

    def request_of(self, number: int) -> Request:
        """The request with that number."""
        return self._requests[number]

    def learn(self, number: int, request: Request) -> None:
        """Note what a number stands for."""
        self._numbers[request] = number
        self._requests[number] = request

    def forget(self, number: int) -> None:
        """Use a number no more."""
        request = self._requests.pop(number, None)
        if request is not None:
            self._numbers.pop(request, None)


class NumberGiver(RequestNumbers):
    """The numbers as the first rank gives them: at most `capacity` at a time."""

    def __init__(self, capacity: int, num_ranks: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._used: OrderedDict[int, None] = OrderedDict()
        self._next = 0
        self._withdrawn: deque[tuple[int, int, Request]] = deque()
        self._late: dict[int, Request] = {}
        self._seen = [0] * num_ranks

    def give(self, request: Request, answer: int) -> tuple[int | None, list[int]]:
        """A number for a request answered in `answer`, None if none are given; and the numbers withdrawn with it."""
        if self._capacity <= 0:
            return None, []
        withdrawn = []
        while len(self._used) >= self._capacity:
            oldest, _ = self._used.popitem(last=False)
            self._withdrawn.append((answer, oldest, self._requests[oldest]))
            self._late[oldest] = self._requests[oldest]
            self.forget(oldest)
            withdrawn.append(oldest)
        number, self._next = self._next, self._next + 1
        self.learn(number, request)
        self._used[number] = None
        return number, withdrawn

    def use(self, number: int) -> None:
        """Note that an operation was repeated."""
        if number in self._used:
            self._used.move_to_end(number)

    def asked(self, number: int) -> Request:
        """The request that a rank means, with numbers it did not know to be withdrawn."""
        request = self._requests.get(number)
        return self._late[number] if request is None else request

    def has_seen(self, rank: int, answer: int) -> None:
        """A rank has received all answers up to `answer`: it no longer sends what they withdrew."""
        self._seen[rank] = answer
        oldest = min(self._seen)
        while self._withdrawn and self._withdrawn[0][0] <= oldest:
            self._late.pop(self._withdrawn.popleft()[1], None)
