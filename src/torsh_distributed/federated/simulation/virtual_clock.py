"""Which virtual clients are at work, and when each will be done: the order in which updates arrive, without waiting."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple


class VirtualArrival(NamedTuple):
    """A client at work; of those with the same time, the one that began first arrives first."""

    done_s: float
    number: int
    """How many clients began before it."""
    client: str
    round: int
    """Whose model it has."""
    attempt: int


class VirtualClock:
    """Time stands still but for arrivals."""

    def __init__(self, now_s: float = 0.0, num_begun: int = 0, working: Sequence[Sequence[Any]] = ()) -> None:
        """What `state` of an earlier clock says."""
        self.now_s, self._num_begun = now_s, num_begun
        self._working = [VirtualArrival(*one) for one in working]
        heapq.heapify(self._working)

    def begin(self, client: str, *, round: int, attempt: int, takes_s: float) -> None:
        """A client gets the model of a round now."""
        heapq.heappush(self._working, VirtualArrival(self.now_s + takes_s, self._num_begun, client, round, attempt))
        self._num_begun += 1

    def next_arrival(self) -> VirtualArrival:
        """The client that is done first, of at least one that is at work. It is then that late."""
        arrival = heapq.heappop(self._working)
        self.now_s = arrival.done_s
        return arrival

    @property
    def working(self) -> list[VirtualArrival]:
        """Those that are not done."""
        return list(self._working)

    def state(self) -> list[object]:
        """As plain values."""
        return [self.now_s, self._num_begun, [list(one) for one in self._working]]
