"""The part of a job's launcher that decides by energy: what is spent of its budgets, and whether it trains or holds.

Lives in the launcher of node 0, where the energy of all nodes and the steps of rank 0 come together. What it knows is
kept in the run's directory, so a job that is started again has the rest of its budget and its first deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torsh_distributed import events
from torsh_distributed.green.carbon.intensity import IntensitySeries
from torsh_distributed.green.energy_budget import EnergyBudget
from torsh_distributed.green.run_record import RunRecord
from torsh_distributed.green.schedule.carbon_policy import CarbonPolicy, PolicyDecision

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_SETTLED = 2
"""Readings after a decision, until they are of what was decided."""


class RunControl:
    """Budgets and policy of one run. `take_…` are called by the launcher's loop, `decide` by the meter's thread."""

    def __init__(
        self,
        config: GreenConfig,
        *,
        min_workers: int,
        max_workers: int,
        now: float,
        record: Path | None,
        note: Callable[[str], None],
    ) -> None:
        """`record` is the run's file; None keeps nothing. Raises InvalidArgument if the deadline is in the past."""
        self._note = note
        self._lock = threading.Lock()
        self._path = record
        self._record = self._open()
        kept: Mapping[str, Any] = {} if self._record is None else self._record.kept
        try:
            self._budget = EnergyBudget.wanted(config, kept.get("budget"))
            self._policy = _policy(config, min_workers, max_workers, now, kept.get("policy"))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if not kept:
                raise
            note(f"what the run spent before is not understood and counts as nothing ({self._path}): {error}")
            self._budget = EnergyBudget.wanted(config)
            self._policy = _policy(config, min_workers, max_workers, now, None)
        else:
            if kept:
                note(f"the run goes on from what it spent and planned before ({self._path})")
        self._workers = max_workers
        self._power_w: dict[tuple[int, str], float] = {}
        self._last: tuple[str, int] | None = None
        self._num_same = 0
        # Powers in a hold. Rank 0 tells of a step up to two messages later, and a step is taken in a hold when ranks
        # regroup: a power counts as that of a job that waits once two messages after it told of none.
        self._held_w: list[float] = []
        self._held_before_w: list[float] = []

    @classmethod
    def is_wanted(cls, config: GreenConfig) -> bool:
        """Whether a plan has a budget or a policy."""
        return config.strategy != "none" or EnergyBudget.wanted(config) is not None

    def _open(self) -> RunRecord | None:
        if self._path is None:
            self._note(
                "a job that is started again has its whole budget and time again: set checkpoint.enabled or "
                "TORSH_EVENTS_DIR, and what was spent is kept there"
            )
            return None
        try:
            return RunRecord(self._path)
        except OSError as error:
            self._note(f"what the run spends cannot be kept ({self._path}): {error}")
        except ValueError as error:
            self._note(f"what the run spent before is not understood and counts as nothing ({self._path}): {error}")
            self._path.unlink(missing_ok=True)
            return RunRecord(self._path)
        return None

    # On the launcher's loop

    def take_steps(self, *, steps: list[tuple[int, float]], total_steps: int | None, workers: int) -> None:
        """A message of rank 0: its new steps as (number, seconds), if any, in a world of so many workers."""
        if self._policy is None:
            return
        with self._lock:
            self._workers = workers
            speed = self._policy.speed
            speed.total_steps = total_steps or speed.total_steps
            for step, step_s in steps:
                speed.take_step(step=step, step_s=step_s, workers=workers)
            for watts in [] if steps else self._held_before_w:
                speed.take_power(watts, workers=0)
            self._held_before_w, self._held_w = [] if steps else self._held_w, []

    @property
    def is_slowing(self) -> bool:
        """Whether a budget is spent and workers are to pause."""
        with self._lock:
            return self._budget is not None and self._budget.is_slowing

    def begin_epoch(self, epoch: int) -> None:
        """A rank tells the epoch that it is in."""
        if self._budget is not None:
            with self._lock:
                self._budget.begin_epoch(epoch)

    def take_energy(self, event: events.EnergyEvent) -> tuple[list[tuple[str, str]], list[events.BudgetEvent]]:
        """What a meter of any node has counted: (actions with their sentences, news of budgets)."""
        with self._lock:
            if event.duration_s > 0:
                self._power_w[event.node, event.meter] = event.joules / event.duration_s
            if self._budget is None:
                return [], []
            return self._budget.take(event), self._budget.take_news()

    # On the meter's thread

    def decide(
        self, series: IntensitySeries, *, now: float
    ) -> tuple[PolicyDecision, events.ScheduleEvent | None] | None:
        """What the policy wants now, and an event if that is something new; None without a policy."""
        if self._policy is None:
            return None
        with self._lock:
            speed = self._policy.speed
            if self._num_same >= _SETTLED and self._power_w:  # else the readings are of what was decided before
                watts = sum(self._power_w.values())
                if self._last is not None and self._last[1] == 0:
                    self._held_w.append(watts)
                else:
                    speed.take_power(watts, workers=self._workers if speed.step > 0 else None)
            found = self._policy.decide(series, now=now)
            until = self._policy.until
        if (found.action, found.workers) == self._last:
            self._num_same += 1
            return found, None
        self._last, self._num_same = (found.action, found.workers), 0
        self._held_w, self._held_before_w = [], []
        event = events.ScheduleEvent(
            rank=-1,
            action=found.action,
            workers=found.workers,
            reason=found.reason,
            deadline=until,
            done_at=found.done_at,
            resumes_at=found.resumes_at,
            planned_grams=found.grams,
        )
        return found, event

    def keep(self) -> None:
        """Write down what is known, so that it outlives this launcher."""
        if self._record is None:
            return
        with self._lock:
            parts = {
                "budget": None if self._budget is None else self._budget.to_dict(),
                "policy": None if self._policy is None else self._policy.to_dict(),
            }
        try:
            self._record.write(parts)
        except OSError as error:
            self._note(f"what the run spends cannot be kept ({self._path}): {error}")
            self._record = None

    def close(self, *, is_done: bool) -> None:
        """The job has ended; one that came to its end starts from the beginning next time."""
        if self._record is not None and is_done:
            self._record.forget()
        else:
            self.keep()


def _policy(
    config: GreenConfig, min_workers: int, max_workers: int, now: float, kept: Mapping[str, Any] | None
) -> CarbonPolicy | None:
    if config.strategy == "none":
        return None
    return CarbonPolicy(config, min_workers=min_workers, max_workers=max_workers, now=now, kept=kept)
