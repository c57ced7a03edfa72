"""How fast bytes have travelled lately: measured, or unknown."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torsh_distributed.comm.recording.intervals import covered_s

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

    Time in which transfers overlap counts once, so concurrency shows as bandwidth. Idle time does not count: the
    figure says what the link gives, not how much is asked of it.
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
        """The figures of the window; None if nothing travelled in it."""
        oldest_s = self._clock() - self._window_s
        with self._lock:
            recent = [transfer for transfer in self._transfers if transfer[1] >= oldest_s]
        if not recent:
            return None
        times = [(start_s, end_s) for start_s, end_s, _ in recent]
        num_bytes = sum(size for *_, size in recent)
        return Bandwidth(num_bytes / covered_s(times), min(end_s - start_s for start_s, end_s in times))
