"""Numbers for operations that ranks repeat at every step, so a request is one number and an answer another; pure.

The first rank of a set gives an operation its number when all ranks have asked for the same, and tells everyone with
the answer. It forgets the operation that was used longest ago when there are too many. A rank may still send a number
that was just forgotten: it is kept until every rank has said that it has seen the answer in which it was withdrawn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from torsh_distributed.migrate.horovod.negotiation.request import Request


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
        """Use a number no more."""
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
