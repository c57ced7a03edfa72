"""What a scheduler did, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class SchedulerStats:
    """What a scheduler did so far; means are None while there is nothing to average."""

    num_submitted: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    """Tasks that were pending when the scheduler was closed after an error or a timeout."""
    num_expired: int = 0
    """Tasks that did not start before their deadline, and those behind them in their stream."""
    num_running: int = 0
    queue_size: int = 0
    peak_queue_size: int = 0
    num_bytes: int = 0
    """Bytes of the tasks that completed."""
    total_queue_s: float = 0.0
    """From submission to start, over all tasks that started."""
    total_run_s: float = 0.0
    """From start to end, over all tasks that ended."""
    bytes_per_s: float | None = None
    """Bandwidth measured over the last ten seconds; None if nothing travelled."""
    rate_limit_bytes_per_s: float | None = None

    @property
    def mean_queue_s(self) -> float | None:
        """From submission to start."""
        num_started = self.num_completed + self.num_failed + self.num_running
        return self.total_queue_s / num_started if num_started else None

    @property
    def mean_run_s(self) -> float | None:
        """From start to end."""
        num_ended = self.num_completed + self.num_failed
        return self.total_run_s / num_ended if num_ended else None
