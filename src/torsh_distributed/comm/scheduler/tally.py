"""What a scheduler did, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """What a scheduler did so far; means are None before there is anything to average."""

    num_submitted: int
    num_completed: int
    num_failed: int
    num_cancelled: int
    num_expired: int
    """Tasks that did not start before their deadline, and those behind them in their stream."""
    num_running: int
    queue_size: int
    peak_queue_size: int
    num_bytes: int
    """Bytes of the tasks that completed."""
    mean_queue_s: float | None
    """From submission to start."""
    mean_run_s: float | None
    bytes_per_s: float | None
    """Bandwidth measured over the last ten seconds; None if nothing travelled."""
    rate_limit_bytes_per_s: float | None


class Tally:
    """The running counts behind `SchedulerStats`."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_completed = 0
        self.num_failed = 0
        self.num_cancelled = 0
        self.num_expired = 0
        self.peak_queue_size = 0
        self._num_started = 0
        self._num_bytes = 0
        self._queue_s = 0.0
        self._run_s = 0.0

    def submitted(self, queue_size: int) -> None:
        """A task was queued, which is now `queue_size` long."""
        self.num_submitted += 1
        self.peak_queue_size = max(self.peak_queue_size, queue_size)

    def started(self, waited_s: float) -> None:
        """A task left the queue to run."""
        self._num_started += 1
        self._queue_s += waited_s

    def finished(self, num_bytes: int, run_s: float, *, is_ok: bool) -> None:
        """A task ran to its end, well or not."""
        self._run_s += run_s
        if is_ok:
            self.num_completed += 1
            self._num_bytes += num_bytes
        else:
            self.num_failed += 1

    def stats(
        self, *, num_running: int, queue_size: int, bytes_per_s: float | None, rate_limit_bytes_per_s: float | None
    ) -> SchedulerStats:
        """The counts so far, with what is true of this moment."""
        num_ended = self.num_completed + self.num_failed
        return SchedulerStats(
            num_submitted=self.num_submitted,
            num_completed=self.num_completed,
            num_failed=self.num_failed,
            num_cancelled=self.num_cancelled,
            num_expired=self.num_expired,
            num_running=num_running,
            queue_size=queue_size,
            peak_queue_size=self.peak_queue_size,
            num_bytes=self._num_bytes,
            mean_queue_s=self._queue_s / self._num_started if self._num_started else None,
            mean_run_s=self._run_s / num_ended if num_ended else None,
            bytes_per_s=bytes_per_s,
            rate_limit_bytes_per_s=rate_limit_bytes_per_s,
        )
