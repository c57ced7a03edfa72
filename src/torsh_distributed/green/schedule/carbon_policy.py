"""Whether a running job trains, with how many workers, or holds: decided again and again from the newest forecast.

Pure: it is told what steps take and what they draw, and asked what to do now. Who asks, tells all ranks (`launch`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.carbon.intensity import IntensitySeries
from torsh_distributed.green.schedule.allocation import JobShape, TimeSlot, WorkerSchedule, allocate, run_now
from torsh_distributed.green.schedule.forecast import slots_ahead
from torsh_distributed.green.schedule.job_speed import JobSpeed
from torsh_distributed.green.schedule.run_times import ScheduleAction, action_now, read_deadline

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_SPARE_SHARE = 0.03
"""Of the time that is left to work: kept before the deadline, for steps that get slower and for regrouping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDecision:
    """What to do from now on."""

    action: ScheduleAction
    workers: int
    """0 for a hold."""
    reason: str
    longest_s: float = 0.0
    """How long a hold may last though nobody ends it: then the deadline would be lost."""
    done_at: float | None = None
    """Planned end, in seconds since the epoch."""
    grams: float | None = None
    """Of the rest, as planned."""
    resumes_at: float | None = None
    """When a hold ends, as planned."""


class CarbonPolicy:
    """One job's. `min_workers` to `max_workers` may train; the deadline of an earlier launcher of the run stays."""

    def __init__(
        self,
        config: GreenConfig,
        *,
        min_workers: int,
        max_workers: int,
        now: float,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """`kept` is `to_dict` of an earlier launcher. Raises InvalidArgument if the deadline is in the past."""
        assert config.deadline is not None, "the plan has looked"
        self._config = config
        self._spare_s = 2 * config.interval_s
        self.speed = JobSpeed(
            max_workers=max_workers, min_workers=min(min_workers, max_workers), efficiency=config.worker_efficiency
        )
        is_same = kept is not None and kept.get("deadline") == config.deadline
        self.until = float(kept["until"]) if is_same and kept is not None else read_deadline(config.deadline, now=now)
        if kept is not None:
            self.speed.restore(kept["speed"])
        self._last: PolicyDecision | None = None
        self._other: PolicyDecision | None = None

    def to_dict(self) -> dict[str, Any]:
        """What a later launcher of the same run goes on from."""
        return {"deadline": self._config.deadline, "until": self.until, "speed": self.speed.to_dict()}

    def decide(self, series: IntensitySeries, *, now: float) -> PolicyDecision:
        """What to do now. Another decision than the last one is taken when it is found twice in a row."""
        found = self._found(series, now)
        known = {one.workers for one in (self._last, self._other) if one is not None}
        if self._last is None or found.workers in known:
            self._last, self._other = found, None
        else:
            self._other = found
        # The figures are the new ones, whatever is done.
        return replace(self._last, done_at=found.done_at, grams=found.grams)

    def _found(self, series: IntensitySeries, now: float) -> PolicyDecision:
        speed = self.speed
        if speed.total_steps is not None and speed.step >= speed.total_steps:
            done = self._train("its steps are done")
            return replace(done, workers=self._last.workers) if self._last and self._last.workers else done
        job = speed.shape(self._config.work_hours)
        if job is None:
            return self._train("its first steps say how long it takes")
        need_s = job.work_h * 3600 / job.speeds[-1]
        until = self.until - self._spare_s - _SPARE_SHARE * need_s
        if now + need_s >= until:
            done_at = now + need_s
            late = done_at > self.until
            told = "the deadline cannot be kept" if late else "the deadline leaves no more time to wait"
            return self._train(told, done_at=done_at)
        if self._config.strategy == "minimize_energy":
            return self._by_energy(job, now, until)
        if self._config.strategy == "maximize_renewable":
            return self._by_share(series, now, until - need_s)
        try:
            slots, _ = slots_ahead(series, now=now, until=until)
        except InvalidArgument as error:
            return self._train(f"no forecast: {error.message}")
        if not speed.has_waited:
            # A job that never waited has not shown what that takes. To assume what it takes at its least while it
            # trains would rule out every hold, and only a hold can tell: the first one, of all workers, counts as free
            # and is measured.
            job = replace(job, idle_w=0.0, min_workers=job.max_workers)
        weighed, note = _weighed(slots, self._config.strategy)
        plan = allocate(job, weighed)
        at_once = run_now(job, slots)
        if self._config.strategy == "minimize_carbon" and at_once.grams <= plan.grams:
            plan = at_once  # machines that wait draw power too
        return self._of_plan(plan, job, weighed[0], note, now=now, latest=until - need_s)

    def _of_plan(
        self, plan: WorkerSchedule, job: JobShape, slot: TimeSlot, note: str, *, now: float, latest: float
    ) -> PolicyDecision:
        action = action_now(plan, max_workers=job.max_workers, has_begun=self.speed.step > 0)
        first = plan.slots[0].workers
        starts = next((begin for begin, _, _ in plan.windows), None)
        told = f"{slot.g_per_kwh:.0f} g/kWh now"
        if not first and starts is not None:
            then = next(one.slot.g_per_kwh for one in plan.slots if one.workers)
            told += f", {then:.0f} in {_span(starts - now)}"
        elif plan.done_at is not None:
            told += f", done in {_span(plan.done_at - now)} of {_span(self.until - now)}"
        return PolicyDecision(
            action=action,
            workers=first,
            reason=told + note,
            longest_s=0.0 if first else max(self._spare_s, latest - now),
            done_at=plan.done_at,
            grams=plan.grams,
            resumes_at=None if first else starts,
        )

    def _by_share(self, series: IntensitySeries, now: float, latest: float) -> PolicyDecision:
        value = series.at(now)
        share = None if value is None else value.renewable_share
        if share is None:
            return self._train("the feed tells no renewable share")
        told = f"{share:.0%} renewable"
        if share > self._config.renewable_train:
            return self._train(told)
        if share < self._config.renewable_hold:
            action: ScheduleAction = "hold" if self.speed.step else "defer"
            return PolicyDecision(action=action, workers=0, reason=told, longest_s=max(self._spare_s, latest - now))
        fewer = max(self.speed.min_workers, math.ceil(self.speed.max_workers / 2))
        if fewer == self.speed.max_workers:
            return self._train(told)
        return PolicyDecision(action="reduce", workers=fewer, reason=told)

    def _by_energy(self, job: JobShape, now: float, until: float) -> PolicyDecision:
        """As many workers as take the fewest joules, those of the others that wait included, and are done in time."""

        def need_s(workers: int) -> float:
            return job.work_h * 3600 / job.speeds[workers - 1]

        def joules(workers: int) -> float:
            return need_s(workers) * (workers * job.busy_w + (job.max_workers - workers) * job.idle_w)

        fitting = [count for count in range(job.min_workers, job.max_workers + 1) if now + need_s(count) <= until]
        workers = min(fitting, key=joules)
        return PolicyDecision(
            action="train" if workers == job.max_workers else "reduce",
            workers=workers,
            reason=f"{joules(workers) / 3.6e6:.3g} kWh for the rest",
            done_at=now + need_s(workers),
        )

    def _train(self, reason: str, *, done_at: float | None = None) -> PolicyDecision:
        return PolicyDecision(action="train", workers=self.speed.max_workers, reason=reason, done_at=done_at)


def _weighed(slots: Sequence[TimeSlot], strategy: str) -> tuple[list[TimeSlot], str]:
    """The slots with what a kilowatt-hour counts for, and a note if that is not what the strategy is called."""
    if strategy == "minimize_energy":
        return [replace(slot, weight=1.0) for slot in slots], ""
    if strategy != "balanced":
        return list(slots), ""
    mean = sum(slot.g_per_kwh for slot in slots) / len(slots)
    shares = [slot.renewable_share for slot in slots]
    if any(share is None for share in shares) or mean <= 0:
        return list(slots), "; the feed tells no renewable share: CO2 alone decides"
    pairs = zip(slots, shares, strict=True)
    return [replace(slot, weight=slot.g_per_kwh / mean + 1 - (share or 0.0)) for slot, share in pairs], ""


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
