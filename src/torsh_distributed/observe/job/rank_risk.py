"""How likely a rank fails soon, as a score from 0 to 1, from trends in its events: memory that grows towards its limit,
a rank that gets slower than it was, a temperature that nears the device's limit, errors of a device's memory.

A job that runs is watched by its observer, a recorded one by `torsh incidents`. A score is not a probability: 0.7 and
more is worth a look. `python -m benchmarks risk` measures how often it is right, in real runs that leak, get slower, or
go well; heat and memory errors cannot be had to order and are tested on series.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.events import Event, HardwareEvent, MemoryEvent, StepEvent
from torsh_distributed.events.recorded import events_in

ALARM = 0.7
"""A score from here on is reported."""
_WINDOW = 40
_LEAST = 8
_SIGNIFICANT = 4.0
"""A slope counts if it is this many times its standard error."""
_FEW_ERRORS = 4
"""So many corrected errors within a run score one half: single ones are common, a row of them is a part that fails."""


@dataclass(frozen=True, kw_only=True)
class RiskScore:
    """The risk of one rank at one moment."""

    time: float
    rank: int
    score: float
    reason: str
    """memory, slowing, temperature or ecc."""
    detail: str


@dataclass(frozen=True)
class _Trend:
    """A straight line through measurements: value at the last of them, change per unit of x, error of that change."""

    last: float
    slope: float
    error: float

    @property
    def is_rising(self) -> bool:
        return self.slope > 0 and self.slope > _SIGNIFICANT * self.error

    def seconds_to(self, limit: float) -> float:
        """Until the line reaches the limit, if x is in seconds; infinite if it does not rise."""
        return max(0.0, limit - self.last) / self.slope if self.is_rising else math.inf


def _trend(xs: Sequence[float], ys: Sequence[float]) -> _Trend:
    middle_x, middle_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    if spread == 0:
        return _Trend(ys[-1], 0.0, math.inf)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - middle_y - slope * (x - middle_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    error = math.sqrt(rest / max(1, len(xs) - 2) / spread)
    return _Trend(middle_y + slope * (xs[-1] - middle_x), slope, error)


class RiskMonitor:
    """Scores ranks from their events. `horizon_s`: a limit that is reached within it scores 1, at twice it 0.5."""

    def __init__(self, *, horizon_s: float = 60.0) -> None:
        self._horizon_s = horizon_s
        self._memory: dict[int, dict[str, deque[tuple[float, float]]]] = {}
        self._own_s: dict[int, deque[tuple[float, float]]] = {}
        self._usual_s: dict[int, float] = {}
        self._celsius: dict[tuple[int, str], deque[tuple[float, float]]] = {}
        self._errors_before: dict[tuple[int, str], tuple[int, int]] = {}

    def forget_from(self, num_ranks: int) -> None:
        """The ranks from this number on have ended."""
        by_rank: tuple[dict[int, Any], ...] = (self._memory, self._own_s, self._usual_s)
        for known in by_rank:
            for rank in [rank for rank in known if rank >= num_ranks]:
                del known[rank]

    def observe(self, event: Event) -> RiskScore | None:
        """Take in an event of any rank; the rank's score by it, once there is enough to say."""
        if isinstance(event, MemoryEvent):
            return self._observe_memory(event)
        if isinstance(event, StepEvent):
            return self._observe_step(event)
        if isinstance(event, HardwareEvent):
            found = [one for one in (self._observe_errors(event), self._observe_heat(event)) if one is not None]
            return max(found, key=lambda one: one.score, default=None)
        return None

    def _observe_memory(self, event: MemoryEvent) -> RiskScore | None:
        devices = self._memory.setdefault(event.rank, {})
        points = devices.setdefault(event.device, deque(maxlen=_WINDOW))
        points.append((event.time, float(event.allocated_bytes)))
        if len(points) < _LEAST or event.limit_bytes is None:
            return None
        trend = _trend([at for at, _ in points], [used for _, used in points])
        left_s = trend.seconds_to(event.limit_bytes)
        score = self._score_of_time(left_s)
        detail = f"{event.device} memory grows by {trend.slope / 2**20:.1f} MiB/s, full in {left_s:.0f} s"
        return RiskScore(time=event.time, rank=event.rank, score=score, reason="memory", detail=detail)

    def _observe_heat(self, event: HardwareEvent) -> RiskScore | None:
        if event.celsius is None or event.limit_celsius is None:
            return None
        points = self._celsius.setdefault((event.rank, event.device), deque(maxlen=_WINDOW))
        points.append((event.time, event.celsius))
        score, detail = 0.0, f"{event.device} has {event.celsius:.0f} °C, its limit is {event.limit_celsius:.0f} °C"
        if event.celsius >= event.limit_celsius:
            score = 1.0
        elif len(points) >= _LEAST:
            trend = _trend([at for at, _ in points], [celsius for _, celsius in points])
            score = self._score_of_time(trend.seconds_to(event.limit_celsius))
        return RiskScore(time=event.time, rank=event.rank, score=score, reason="temperature", detail=detail)

    def _observe_errors(self, event: HardwareEvent) -> RiskScore | None:
        """What a device counted before the run does not belong to the run's trend."""
        if event.corrected_errors is None and event.uncorrected_errors is None:
            return None
        corrected, uncorrected = event.corrected_errors or 0, event.uncorrected_errors or 0
        before = self._errors_before.setdefault((event.rank, event.device), (corrected, uncorrected))
        more, lost = max(0, corrected - before[0]), max(0, uncorrected - before[1])
        score = 1.0 if lost else more / (more + _FEW_ERRORS)
        detail = f"the memory of {event.device} corrected {more} errors since the start, and could not correct {lost}"
        return RiskScore(time=event.time, rank=event.rank, score=score, reason="ecc", detail=detail)

    def _score_of_time(self, left_s: float) -> float:
        return 1.0 if left_s <= self._horizon_s else self._horizon_s / left_s

    def _observe_step(self, event: StepEvent) -> RiskScore | None:
        if event.comm_s is None:
            return None
        return self.observe_own_time(
            event.rank, step=event.step, time=event.time, own_s=max(0.0, event.duration_s - event.comm_s)
        )

    def observe_own_time(self, rank: int, *, step: int, time: float, own_s: float) -> RiskScore | None:
        """A rank's own time of a step is what it does not wait for others; it is compared with what it was at first."""
        points = self._own_s.setdefault(rank, deque(maxlen=_WINDOW))
        points.append((float(step), own_s))
        own = [took_s for _, took_s in points]
        if len(points) < 2 * _LEAST:
            return None
        # The first steps warm up caches and allocators.
        usual = self._usual_s.setdefault(rank, statistics.median(own[_LEAST:]))
        if usual <= 0:
            return None
        # Of a rank that got slower nearly every step is; of one whose core others use, some are as short as ever.
        recent = sorted(own[-2 * _LEAST :])[1]
        score = min(1.0, max(0.0, recent / usual - 1))
        detail = f"nearly every step takes {recent * 1e3:.1f} ms of its own, {recent / usual:.1f} times what it took"
        return RiskScore(time=time, rank=rank, score=score, reason="slowing", detail=detail)


class RankRisks:
    """The newest scores of a job's ranks, and the first alarm of each rank and reason."""

    def __init__(self, *, horizon_s: float = 60.0) -> None:
        self._monitor = RiskMonitor(horizon_s=horizon_s)
        self._newest: dict[tuple[int, str], RiskScore] = {}
        self.alarms: dict[tuple[int, str], RiskScore] = {}

    def observe(self, event: Event) -> RiskScore | None:
        """Take in an event; the score if it is a new alarm."""
        return self._note(self._monitor.observe(event))

    def observe_own_time(self, rank: int, *, step: int, time: float, own_s: float) -> RiskScore | None:
        """Take in a step; the score if it is a new alarm."""
        return self._note(self._monitor.observe_own_time(rank, step=step, time=time, own_s=own_s))

    def keep_below(self, num_ranks: int) -> None:
        """The ranks from this number on are gone: a process that gets such a number later has trends of its own."""
        for key in [key for key in self._newest if key[0] >= num_ranks]:
            del self._newest[key]
            self.alarms.pop(key, None)
        self._monitor.forget_from(num_ranks)

    def newest(self) -> list[RiskScore]:
        """One for each rank and reason, the highest first."""
        return sorted(self._newest.values(), key=lambda one: -one.score)

    def _note(self, risk: RiskScore | None) -> RiskScore | None:
        if risk is None:
            return None
        key = risk.rank, risk.reason
        self._newest[key] = risk
        is_new = risk.score >= ALARM and key not in self.alarms
        if is_new:
            self.alarms[key] = risk
        return risk if is_new else None


def recorded_alarms(directory: Path, *, horizon_s: float = 60.0) -> list[RiskScore]:
    """The alarms that the events of a run, recorded in `directory`, give."""
    found: list[Event] = []
    for path in directory.glob("rank-*.jsonl"):
        found += [one for one in events_in(path) if isinstance(one, MemoryEvent | StepEvent | HardwareEvent)]
    return alarms(found, horizon_s=horizon_s)


def alarms(events: Iterable[Event], *, horizon_s: float = 60.0) -> list[RiskScore]:
    """The first alarm of each rank and reason in a run's events, in the order of time."""
    monitor = RiskMonitor(horizon_s=horizon_s)
    found: dict[tuple[int, str], RiskScore] = {}
    for event in sorted(events, key=lambda one: one.time):
        risk = monitor.observe(event)
        if risk is not None and risk.score >= ALARM:
            found.setdefault((risk.rank, risk.reason), risk)
    return list(found.values())
