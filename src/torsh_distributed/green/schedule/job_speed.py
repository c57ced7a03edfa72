"""What a job has shown of itself while it ran: its speed by workers and its power, and what follows for the rest."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.green.schedule.allocation import JobShape

_KEPT_STEPS = 32
_LEAST_STEPS = 3
_LEAST_GAIN = 1e-3
_MOST_IDLE_SHARE = 0.95
"""Of the busy power: a node whose power hardly moves must still count as one that works more when it works."""


@dataclass
class JobSpeed:
    """Measured by worker count. `efficiency` stands in for counts that were not seen yet."""

    max_workers: int
    min_workers: int
    efficiency: float
    step: int = 0
    total_steps: int | None = None
    rates: dict[int, float] = field(default_factory=dict)
    """Steps in a second, by workers."""
    busy_w: float | None = None
    """Of the whole job while all that may work do, by what was measured last."""
    idle_w: float | None = None
    """Of the whole job at its least; more than it takes while it waits, unless it `has_waited`."""
    has_waited: bool = False
    """Whether its power was measured in a hold."""
    _newest: dict[int, deque[float]] = field(default_factory=dict)

    def take_step(self, *, step: int, step_s: float, workers: int) -> None:
        """A step of the job took that long; the median of the last ones counts, so one with a hold in it does not."""
        self.step = step
        if step_s <= 0 or not 1 <= workers <= self.max_workers:
            return
        kept = self._newest.setdefault(workers, deque(maxlen=_KEPT_STEPS))
        kept.append(step_s)
        if len(kept) >= _LEAST_STEPS:
            self.rates[workers] = 1.0 / statistics.median(kept)

    def take_power(self, watts: float, *, workers: int | None) -> None:
        """The power of all nodes over an interval, while that many workers trained; 0 in a hold, None at the start."""
        if watts <= 0:
            return
        self.has_waited |= workers == 0
        self.idle_w = watts if self.idle_w is None else min(self.idle_w, watts)
        if workers:
            whole = self.idle_w + max(0.0, watts - self.idle_w) * self.max_workers / workers
            self.busy_w = whole if self.busy_w is None else 0.8 * self.busy_w + 0.2 * whole

    @property
    def is_measured(self) -> bool:
        """Whether the time of the rest can be said from what was seen."""
        return bool(self.rates) and self.total_steps is not None

    def speeds(self) -> list[float]:
        """Steps in a second with 1, 2, … workers: measured, or from the nearest that was, each adding no more than the
        one before it, as a plan by marginals needs it."""
        known = self.rates or {1: 1.0}

        def of(workers: int) -> float:
            near = min(known, key=lambda count: (abs(count - workers), count))
            model = (1 + self.efficiency * (workers - 1)) / (1 + self.efficiency * (near - 1))
            return known[near] * model

        found, gain = [of(1)], of(1)
        for workers in range(2, self.max_workers + 1):
            gain = min(gain, max(of(workers) - found[-1], _LEAST_GAIN * found[0]))
            found.append(found[-1] + gain)
        return found

    def shape(self, work_hours: float | None) -> JobShape | None:
        """The rest of the job; None while neither steps nor the user have told how long it takes.

        `work_hours` is the user's word for the whole with one worker.
        """
        speeds = self.speeds()
        if self.is_measured:
            assert self.total_steps is not None, "is_measured has looked"
            work_h = max(0, self.total_steps - self.step) / speeds[0] / 3600
        elif work_hours is not None:
            done = self.step / self.total_steps if self.total_steps else 0.0
            work_h = work_hours * max(0.0, 1 - done)
        else:
            return None
        busy_w = (self.busy_w or 1.0) / self.max_workers
        idle_w = min((self.idle_w or 0.0) / self.max_workers, _MOST_IDLE_SHARE * busy_w)
        relative = [speed / speeds[0] for speed in speeds]
        return JobShape(
            work_h=max(work_h, 1e-9), speeds=relative, busy_w=busy_w, idle_w=idle_w, min_workers=self.min_workers
        )

    def to_dict(self) -> dict[str, Any]:
        """What a later launcher of the same run needs."""
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "rates": {str(workers): rate for workers, rate in self.rates.items()},
            "busy_w": self.busy_w,
            "idle_w": self.idle_w,
            "has_waited": self.has_waited,
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from `to_dict` of an earlier launcher; raises TypeError or ValueError if it is damaged."""
        total, busy_w, idle_w = kept["total_steps"], kept["busy_w"], kept["idle_w"]
        rates = {int(workers): float(rate) for workers, rate in kept["rates"].items()}
        self.rates = {workers: rate for workers, rate in rates.items() if 1 <= workers <= self.max_workers and rate > 0}
        self.step = int(kept["step"])
        self.total_steps = None if total is None else int(total)
        self.busy_w = None if busy_w is None else float(busy_w)
        self.idle_w = None if idle_w is None else float(idle_w)
        self.has_waited = bool(kept.get("has_waited"))  # an earlier version did not keep it
