"""What a job's energy was spent on: the intervals of its meters, shared over the steps that ran in them.

A counter moves about ten times a second and a step may take less, so an interval of a second or more is shared over
the steps inside it by their time. The parts add up to what the meters counted. Fed with events, live or from files.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field, replace

from torsh_distributed import events
from torsh_distributed.observe.job.energy_summary import EnergySummary, EpochEnergy, MeterRow
from torsh_distributed.observe.job.energy_trend import EnergyTrend
from torsh_distributed.observe.metrics.step_record import StepRecord

_MAX_INTERVALS = 200_000
_MAX_KEPT_STEPS = 200_000
_MAX_FAILURES = 10_000
_MAX_NOTES = 20
_MAX_EPOCHS = 10_000
_LEAST_INTERVAL_S = 0.5
_SILENT_S = 30.0
_MOST_W = 1e9
"""Of one meter: more is damage to a file of events."""
J_PER_KWH = 3.6e6


@dataclass(slots=True)
class _Track:
    """One meter of a node."""

    source: str
    is_measured: bool
    joules: float = 0.0
    duration_s: float = 0.0
    least_w: float = math.inf
    most_w: float = 0.0
    newest_w: float = 0.0
    until: float = 0.0
    detail: str | None = None
    computed_s: float = 0.0
    """Time in which it computed, of `watched_s`."""
    watched_s: float = 0.0
    peak_celsius: float | None = None
    num_others: int = 0
    shared_j: float = 0.0
    own_j: float = 0.0
    """Of `known_j`, by this job's part of the computing time."""
    known_j: float = 0.0
    intervals: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_INTERVALS))
    """(start, end, joules) of what no step has taken yet."""

    def take_state(self, event: events.EnergyEvent) -> None:
        """What the device told beside its energy."""
        if event.utilization is not None:
            self.computed_s += event.utilization * event.duration_s
            self.watched_s += event.duration_s
        if event.celsius is not None:
            self.peak_celsius = max(event.celsius, self.peak_celsius or event.celsius)
        if event.num_others:
            self.num_others = max(self.num_others, event.num_others)
            self.shared_j += event.joules
            if event.own_share is not None:
                self.own_j += event.joules * event.own_share
                self.known_j += event.joules

    def row(self, node: int, name: str) -> MeterRow:
        """All of it, for a summary."""
        return MeterRow(
            node,
            name,
            self.source,
            self.is_measured,
            self.joules,
            self.newest_w,
            self.detail,
            mean_w=self.joules / self.duration_s,
            peak_w=max(self.most_w, self.joules / self.duration_s),
            utilization=self.computed_s / self.watched_s if self.watched_s > 0 else None,
            peak_celsius=self.peak_celsius,
            shared_j=self.shared_j,
            num_others=self.num_others,
            own_share=self.own_j / self.known_j if self.known_j > 0 else None,
        )

    def take_until(self, end: float) -> float:
        """The joules before `end` that were not taken yet."""
        taken_j = 0.0
        while self.intervals and self.intervals[0][0] < end:
            start, stop, joules = self.intervals.popleft()
            if stop <= end:
                taken_j += joules
            else:
                part_j = joules * (end - start) / (stop - start)
                taken_j += part_j
                self.intervals.appendleft((end, stop, joules - part_j))
        return taken_j


class EnergyAccount:
    """The account of one job. `take_…` may come in any order between meters and steps, each in the order of time."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[int, str], _Track] = {}
        self._by_rank: dict[int, float] = {}
        self._by_epoch: dict[int, EpochEnergy] = {}
        self._pending: deque[StepRecord] = deque(maxlen=_MAX_KEPT_STEPS)
        self._kept: deque[tuple[int, float, int]] = deque(maxlen=_MAX_KEPT_STEPS)
        """(number, joules, samples) of steps that count."""
        self._failures: list[float] = []
        self._holds: deque[tuple[float, float]] = deque(maxlen=_MAX_FAILURES)
        """(begin, end) of holds; the end of the last one is infinite while it lasts."""
        self._last_end: float | None = None
        self._spread = _Spread()
        self._held_j = self._steps_j = self._start_j = self._failures_j = self._undone_j = self._skipped_j = 0.0
        self._num_steps = self._num_samples = 0
        self._waited_s = self._stepped_s = 0.0
        self.trend = EnergyTrend()
        """Its course over time."""
        self._grams: float | None = None
        self._ungraded_j = 0.0
        self._renewable_j = self._known_j = 0.0
        self._peak_w = 0.0
        self._begin = math.inf
        self.carbon: events.CarbonEvent | None = None
        """The intensity that counts now."""
        self.schedule: events.ScheduleEvent | None = None
        """What the policy on energy does now."""
        self.budgets: dict[str, events.BudgetEvent] = {}
        """The newest word on each budget."""
        self.notes: list[str] = []

    @property
    def has_energy(self) -> bool:
        """Whether a meter has told anything."""
        return bool(self._tracks)

    # Feeding

    def take_energy(self, event: events.EnergyEvent) -> None:
        """An interval of a meter."""
        if event.duration_s <= 0 or not 0 <= event.joules <= _MOST_W * event.duration_s:
            return
        if event.g_per_kwh is not None and not 0 <= event.g_per_kwh < math.inf:
            event = replace(event, g_per_kwh=None)
        key = event.node, event.meter
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = _Track(event.source, event.is_measured)
        start = event.time - event.duration_s
        self._begin = min(self._begin, start)
        track.intervals.append((start, event.time, event.joules))
        track.joules += event.joules
        track.duration_s += event.duration_s
        track.until = event.time
        track.newest_w = event.joules / event.duration_s
        if event.duration_s >= _LEAST_INTERVAL_S:
            track.least_w = min(track.least_w, track.newest_w)
            track.most_w = max(track.most_w, track.newest_w)
        self._peak_w = max(self._peak_w, sum(one.newest_w for one in self._tracks.values()))
        if event.is_measured and event.detail is not None and len(self.notes) < _MAX_NOTES:
            self.notes.append(f"node {event.node}, {event.meter}: {event.detail}")
        track.detail = event.detail or track.detail
        track.take_state(event)
        if event.epoch is not None and (event.epoch in self._by_epoch or len(self._by_epoch) < _MAX_EPOCHS):
            epoch = self._by_epoch.setdefault(event.epoch, EpochEnergy())
            epoch.joules += event.joules
            epoch.grams += event.joules / J_PER_KWH * (event.g_per_kwh or 0.0)
            epoch.ungraded_j += event.joules if event.g_per_kwh is None else 0.0
        for rank in event.ranks:
            self._by_rank[rank] = self._by_rank.get(rank, 0.0) + event.joules / len(event.ranks)
        # Without an intensity the feed knows nothing of this time: its last share is of another.
        share = self.carbon.renewable_share if self.carbon is not None and event.g_per_kwh is not None else None
        self.trend.add(event.time, event.duration_s, event.joules, g_per_kwh=event.g_per_kwh, renewable_share=share)
        if event.g_per_kwh is None:
            self._ungraded_j += event.joules
        else:
            self._grams = (self._grams or 0.0) + event.joules / J_PER_KWH * event.g_per_kwh
        if share is not None:
            self._renewable_j += event.joules * share
            self._known_j += event.joules
        self._share_out()

    def take_carbon(self, event: events.CarbonEvent) -> None:
        """Another intensity counts from now on."""
        self.carbon = event

    def take_schedule(self, event: events.ScheduleEvent) -> None:
        """The policy on energy decided: workers hold, or train again."""
        was_held = self.schedule is not None and self.schedule.workers == 0
        self.schedule = event
        if event.workers == 0 and not was_held:
            self._holds.append((event.time, math.inf))
        elif event.workers and was_held and self._holds:
            self._holds[-1] = (self._holds[-1][0], event.time)

    def take_budget(self, event: events.BudgetEvent) -> None:
        """A budget was spent further."""
        self.budgets[event.name] = event

    def take_step(self, step: StepRecord) -> None:
        """A step of the rank that stands for the job."""
        if not self._pending or self._pending[-1].time <= step.time:
            self._pending.append(step)
            self._share_out()

    def take_wait(self, step: StepRecord) -> None:
        """A step of any rank: what it waited for others."""
        if step.wait_s is not None:
            self._waited_s += step.wait_s
            self._stepped_s += step.step_s

    def take_failure(self, time: float) -> None:
        """A worker was lost."""
        if len(self._failures) < _MAX_FAILURES:
            bisect.insort(self._failures, time)

    # Sharing out

    def _share_out(self) -> None:
        """Give steps what was counted while they ran, as far as the meters have told."""
        if not self._tracks:
            return
        newest = max(track.until for track in self._tracks.values())
        # A node that has left is not waited for.
        until = min(track.until for track in self._tracks.values() if track.until > newest - _SILENT_S)
        while self._pending and self._pending[0].time <= until:
            step = self._pending[0]
            has_failed = self._last_end is not None and self._has_failure(self._last_end, step.time)
            length_s = step.step_s
            if self._last_end is None or has_failed:
                # The first step of a process has its start in it: it counts for no longer than the one after it.
                if len(self._pending) < 2:
                    return
                length_s = min(length_s, self._pending[1].step_s)
            self._pending.popleft()
            begin = max(step.time - length_s, self._last_end or 0.0)
            released = self._released_before(step.time)
            if released is not None:  # the time of this step has the hold before it in it
                self._held_j += self._take_until(released)
                begin = max(begin, released)
            before_j = self._take_until(begin)
            if self._last_end is None:
                self._start_j += before_j
            elif has_failed:
                self._failures_j += before_j
            self._add_step(step, self._take_until(step.time))
            self._last_end = step.time

    def _released_before(self, time: float) -> float | None:
        """The end of the last hold that ended after the last step and before `time`."""
        begin = self._last_end or 0.0
        return next((end for _, end in reversed(self._holds) if begin < end <= time), None)

    def _take_until(self, end: float) -> float:
        return math.fsum(track.take_until(end) for track in self._tracks.values())

    def _has_failure(self, begin: float, end: float) -> bool:
        at = bisect.bisect_right(self._failures, begin)
        return at < len(self._failures) and self._failures[at] <= end

    def _add_step(self, step: StepRecord, joules: float) -> None:
        if step.is_skipped:
            self._skipped_j += joules
            return
        while self._kept and self._kept[-1][0] >= step.step:  # it is done again: what it was before is lost
            _, lost_j, lost_samples = self._kept.pop()
            self._undone_j += lost_j
            self._steps_j -= lost_j
            self._num_steps -= 1
            self._num_samples -= lost_samples
        samples = step.num_samples or 0
        self._kept.append((step.step, joules, samples))
        self._steps_j += joules
        self._num_steps += 1
        self._num_samples += samples
        self.trend.add_samples(step.time, samples)
        self._spread.add(joules)

    # Looking

    def step_joules(self) -> list[tuple[int, float]]:
        """(number, joules) of the newest steps that count, oldest first."""
        return [(number, joules) for number, joules, _ in self._kept]

    def summary(self, *, total_steps: int | None = None) -> EnergySummary | None:
        """The account so far; None without a meter. `total_steps` is how many the job has to do, if that is known."""
        if not self._tracks:
            return None
        tracks = self._tracks.values()
        total_j = math.fsum(track.joules for track in tracks)
        duration_s = max(track.until for track in tracks) - self._begin
        idle_w = math.fsum(track.least_w for track in tracks if math.isfinite(track.least_w))
        is_idle_known = all(math.isfinite(track.least_w) for track in tracks)
        waiting = self._waited_s / self._stepped_s if self._stepped_s > 0 else None
        attributed_j = (
            self._held_j + self._steps_j + self._start_j + self._failures_j + self._undone_j + self._skipped_j
        )
        predicted_j, error_j = self._prediction(total_j, total_steps)
        return EnergySummary(
            total_j=total_j,
            measured_j=math.fsum(track.joules for track in tracks if track.is_measured),
            begin=self._begin,
            duration_s=duration_s,
            mean_w=total_j / duration_s if duration_s > 0 else 0.0,
            peak_w=self._peak_w,
            idle_w=idle_w if is_idle_known else None,
            # Of the time that meters were read: a run that goes on a day later did not draw it overnight.
            idle_j=min(total_j, math.fsum(one.least_w * one.duration_s for one in tracks)) if is_idle_known else None,
            steps_j=self._steps_j,
            waiting_j=None if waiting is None else self._steps_j * waiting,
            start_j=self._start_j,
            failures_j=self._failures_j,
            undone_j=self._undone_j,
            skipped_j=self._skipped_j,
            held_j=self._held_j,
            other_j=max(0.0, total_j - attributed_j),
            num_steps=self._num_steps,
            num_samples=self._num_samples,
            grams=self._grams,
            ungraded_j=self._ungraded_j,
            renewable_share=self._renewable_j / self._known_j if self._known_j > 0 else None,
            predicted_j=predicted_j,
            predicted_error_j=error_j,
            meters=tuple(track.row(node, name) for (node, name), track in sorted(self._tracks.items())),
            by_epoch=dict(sorted(self._by_epoch.items())),
            by_rank=dict(sorted(self._by_rank.items())),
            carbon=None if self.carbon is None else events.to_record(self.carbon),
            schedule=None if self.schedule is None else events.to_record(self.schedule),
            budgets=tuple(events.to_record(one) for one in self.budgets.values()),
            notes=tuple(self.notes),
        )

    def _prediction(self, total_j: float, total_steps: int | None) -> tuple[float | None, float | None]:
        """The job's joules at its end, and two standard errors of that: what a step took so far × the steps left."""
        if total_steps is None or self._num_steps < 2 or not self._kept:
            return None, None
        left = max(0, total_steps - self._kept[-1][0])
        mean_j, error_j = self._spread.mean_and_error()
        return total_j + left * mean_j, 2 * left * error_j


class _Spread:
    """Mean and standard error of a growing series."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = 0.0

    def add(self, value: float) -> None:
        self._count += 1
        before = value - self._mean
        self._mean += before / self._count
        self._squares += before * (value - self._mean)

    def mean_and_error(self) -> tuple[float, float]:
        if self._count < 2:
            return self._mean, 0.0
        return self._mean, math.sqrt(self._squares / (self._count - 1) / self._count)
