"""Times the averaging of buckets, and how much of it overlaps with backward."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from torsh_distributed import events
from torsh_distributed.comm.recording.intervals import covered_s


@dataclass(frozen=True, kw_only=True)
class OverlapStats:
    """How much of the communication of gradients overlapped with backward, as measured on this rank."""

    num_steps: int
    comm_s: float
    """Seconds during which gradients were being sent; overlapping buckets count once."""

    hidden_s: float
    """The part of it before the last gradient of its step was ready, while backward was computing."""

    @property
    def exposed_s(self) -> float:
        """The part that training waited for."""
        return self.comm_s - self.hidden_s

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of all communication; None if there was none."""
        return self.hidden_s / self.comm_s if self.comm_s else None


class BucketClock:
    """Records when the averaging of each bucket starts and ends.

    `add` runs on the threads that send buckets, the rest on the training thread; a list's append is atomic.
    """

    def __init__(self) -> None:
        self.step = 0
        self._intervals: list[tuple[float, float]] = []
        self._ready: float | None = None
        self._comm_s = 0.0
        self._hidden_s = 0.0
        self._num_steps = 0
        self._taken_s = 0.0

    def add(self, index: int, num_bytes: int, start: float, *, codec: str | None, wire_bytes: int | None) -> None:
        """Record a bucket whose averaging began at `start`, on the monotonic clock, and ends now."""
        end = time.monotonic()
        self._intervals.append((start, end))
        if events.wanted(events.BucketEvent):
            events.emit(
                events.BucketEvent(
                    step=self.step,
                    index=index,
                    num_bytes=num_bytes,
                    duration_s=end - start,
                    codec=codec,
                    wire_bytes=wire_bytes,
                )
            )

    def note_ready(self) -> None:
        """The last gradient of the step is ready: from here on, training waits for communication."""
        self._ready = time.monotonic()

    def end_step(self) -> None:
        """All buckets of the step are averaged."""
        intervals, self._intervals = self._intervals, []
        if not intervals:
            return
        ready, self._ready = self._ready, None
        self._comm_s += covered_s(intervals)
        if ready is not None:
            self._hidden_s += covered_s(_before(intervals, ready))
        self._num_steps += 1

    def take_s(self) -> float:
        """Seconds spent sending gradients since the last call; starts a new step."""
        self.end_step()
        new_s, self._taken_s = self._comm_s - self._taken_s, self._comm_s
        self.step += 1
        return new_s

    def overlap(self) -> OverlapStats:
        """Totals since construction."""
        return OverlapStats(num_steps=self._num_steps, comm_s=self._comm_s, hidden_s=self._hidden_s)


def _before(intervals: Iterable[tuple[float, float]], moment: float) -> list[tuple[float, float]]:
    return [(start, min(end, moment)) for start, end in intervals if start < moment]
