"""How fast bytes have travelled lately: measured, or not known."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MAX_TRANSFERS = 1000


@dataclass(frozen=True)
class Bandwidth:
    """What was measured in a window."""

    bytes_per_s: float
    shortest_s: float
    """The shortest transfer: what even an empty one costs."""

    def estimated_s(self, num_bytes: int) -> float:
        """How long a transfer would take by these figures."""
        return max(self.shortest_s, num_bytes / self.bytes_per_s)


class BandwidthMonitor:
    """Bytes per second over the transfers that ended in the last `window_s` seconds; at most 1,000 are kept.

    Time in which several transfers overlap counts once, so that concurrency shows as bandwidth. Idle time does
    not count: the question is what the wire gives, not how much is asked of it.
    """

    def __init__(self, window_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._transfers: deque[tuple[float, float, int]] = deque(maxlen=_MAX_TRANSFERS)
        self._lock = threading.Lock()

    def add(self, num_bytes: int, start_s: float, end_s: float) -> None:
        """Note a transfer by its times on the monotonic clock. Empty ones say nothing about bandwidth."""
        if num_bytes > 0 and end_s > start_s:
            with self._lock:
                self._transfers.append((start_s, end_s, num_bytes))

    def measured(self) -> Bandwidth | None:
        """The figures of the window; None where nothing travelled in it."""
        oldest_s = self._clock() - self._window_s
        with self._lock:
            recent = [transfer for transfer in self._transfers if transfer[1] >= oldest_s]
        if not recent:
            return None
        num_bytes = sum(size for *_, size in recent)
        return Bandwidth(num_bytes / _covered_s(recent), min(end - start for start, end, _ in recent))


def _covered_s(transfers: Sequence[tuple[float, float, int]]) -> float:
    covered_s, reached_s = 0.0, float("-inf")
    for start_s, end_s, _ in sorted(transfers):
        covered_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return covered_s
