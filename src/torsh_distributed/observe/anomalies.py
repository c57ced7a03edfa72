"""Finding what is unusual: detectors judge one series each, a watch feeds them from the job.

Streaming detectors: each takes the values of one series, one at a time, and says when it becomes unusual.
The tested value is never part of its own baseline. All keep a bounded number of values. A severity lies between 0 and
10; a detector reports once when an episode begins and is ready again after it has ended.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from typing_extensions import override

from torsh_distributed.observe.job.job_view import MAX_RANKS, JobView
from torsh_distributed.observe.job.rank_view import ValueKey
from torsh_distributed.observe.metrics.step_record import StepRecord, share_of_steps

_MAD_TO_STD = 1.4826
_LEAST_SAMPLES = 10
_PIECES = 6
_SPREAD_AGE = 5


class Detector(ABC):
    """Judges a series."""

    @abstractmethod
    def add(self, value: float) -> float | None:
        """Take the next value; the severity if an episode begins with it, else None."""


class SpikeDetector(Detector):
    """A value far above the newest ones: a robust z-score, from median and median deviation, of the logarithm.

    Values are positive, such as durations. A spike does not become part of the baseline; a lasting change does, after
    as many values as make it the new usual.
    """

    def __init__(self, *, z_limit: float = 6.0, least_ratio: float = 1.5, window: int = 60) -> None:
        self._z_limit = z_limit
        self._least_ratio = math.log(least_ratio)
        self._baseline: deque[float] = deque(maxlen=window)
        self._held_back: deque[float] = deque(maxlen=_LEAST_SAMPLES)
        self._spread: tuple[float, float] | None = None
        self._num_added = 0
        self._is_in_episode = False

    @override
    def add(self, value: float) -> float | None:
        if not math.isfinite(value) or value <= 0:
            return None
        level = math.log(value)
        if len(self._baseline) < _LEAST_SAMPLES:
            self._baseline.append(level)
            return None
        if self._spread is None or self._num_added >= _SPREAD_AGE:
            # Of dozens of values a few more say the same, and sorting them for each is most of what this costs.
            self._spread, self._num_added = robust_spread(self._baseline), 0
        middle, scatter = self._spread
        excess = level - middle
        z = excess / max(scatter, 0.01)
        if z < self._z_limit or excess < self._least_ratio:
            self._baseline.append(level)
            self._num_added += 1
            self._held_back.clear()
            self._is_in_episode = False
            return None
        self._held_back.append(level)
        if len(self._held_back) == _LEAST_SAMPLES:
            self._baseline.clear()
            self._baseline.extend(self._held_back)
            self._spread = None
            self._held_back.clear()
        if self._is_in_episode:
            return None
        self._is_in_episode = True
        return _scaled(excess / math.log(10))


class LevelShiftDetector(Detector):
    """A lasting rise of the level: a cumulative sum of robust z-scores against a frozen baseline.

    The baseline is the first `warm_up` values. Small scatter does not add up, single spikes are clipped, a rise by
    `least_ratio` that lasts does. After an episode the baseline is measured again.
    """

    def __init__(self, *, warm_up: int = 30, least_ratio: float = 1.15, limit: float = 12.0) -> None:
        self._warm_up = warm_up
        self._least_ratio = math.log(least_ratio)
        self._limit = limit
        self._baseline: list[float] = []
        self._spread: tuple[float, float] | None = None
        self._recent: deque[float] = deque(maxlen=12)
        self._total = 0.0

    @override
    def add(self, value: float) -> float | None:
        if not math.isfinite(value) or value <= 0:
            return None
        level = math.log(value)
        if len(self._baseline) < self._warm_up:
            self._baseline.append(level)
            self._spread = None
            return None
        if self._spread is None:
            self._spread = robust_spread(self._baseline)
        middle, scatter = self._spread
        self._recent.append(level)
        drift = (level - middle) / max(scatter, 0.02)
        # One step counts for at most three deviations: a spike alone cannot reach the limit.
        self._total = max(0.0, self._total + min(drift, 3.0) - 0.75)
        if self._total < self._limit or len(self._recent) < 8:
            return None
        rise = statistics.median(self._recent) - middle
        if rise < self._least_ratio:
            return None
        self._baseline = []
        self._recent.clear()
        self._total = 0.0
        return _scaled(rise / math.log(3))


class TrendDetector(Detector):
    """A steady rise over a window, such as a leak of memory: nearly every sixth of it lies above the one before.

    A jump is not a trend, nor is the growth of the first minutes, in which a process fills its caches.
    """

    def __init__(self, *, window: int = 60, warm_up: int = 10, least_growth: float = 0.03) -> None:
        self._newest: deque[float] = deque(maxlen=window)
        self._skip = warm_up
        self._least_growth = least_growth
        self._is_in_episode = False

    @override
    def add(self, value: float) -> float | None:
        if not math.isfinite(value) or value <= 0:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._newest.append(value)
        if len(self._newest) < (self._newest.maxlen or 0):
            return None
        values = list(self._newest)
        growth = self._growth(values)
        if growth is None:
            self._is_in_episode = False
            return None
        if self._is_in_episode:
            return None
        self._is_in_episode = True
        return _scaled(growth / 0.5)

    def _growth(self, values: Sequence[float]) -> float | None:
        """How much the window rises, as a share; None if it does not rise all along."""
        size = len(values) // _PIECES
        pieces = [statistics.median(values[start * size : (start + 1) * size]) for start in range(_PIECES)]
        rises = [after - before for before, after in itertools.pairwise(pieces)]
        growth = pieces[-1] / pieces[0] - 1
        # A jump lies within one piece or between two; a trend is in nearly all of them.
        fair_share = (pieces[-1] - pieces[0]) / len(rises)
        num_rising = sum(rise > 0.25 * fair_share for rise in rises)
        return growth if growth >= self._least_growth and num_rising >= len(rises) - 1 else None


class SustainedDetector(Detector):
    """A share beyond a limit in most of the newest values: a bottleneck that lasts."""

    def __init__(self, limit: float, *, is_above: bool = True, window: int = 10, share: float = 0.8) -> None:
        self._limit = limit
        self._is_above = is_above
        self._share = share
        self._newest: deque[float] = deque(maxlen=window)
        self._is_in_episode = False

    @override
    def add(self, value: float) -> float | None:
        if not math.isfinite(value):
            return None
        self._newest.append(value)
        if len(self._newest) < (self._newest.maxlen or 0):
            return None
        beyond = [one > self._limit if self._is_above else one < self._limit for one in self._newest]
        share = sum(beyond) / len(beyond)
        if share < self._share:
            self._is_in_episode = self._is_in_episode and share > self._share / 2
            return None
        if self._is_in_episode:
            return None
        self._is_in_episode = True
        room = 1 - self._limit if self._is_above else self._limit
        distance = abs(statistics.median(self._newest) - self._limit)
        return _scaled(distance / max(room, 1e-9))


def robust_spread(values: Sequence[float] | deque[float]) -> tuple[float, float]:
    """Median, and the standard deviation that the median deviation stands for."""
    middle = statistics.median(values)
    return middle, _MAD_TO_STD * statistics.median(abs(value - middle) for value in values)


def _scaled(share: float) -> float:
    """A share of the worst that is expected, on the scale from 0 to 10."""
    return round(min(10.0, max(0.0, 10 * share)), 2)


MAX_ANOMALIES = 200
_MAX_SERIES = 4096


class AnomalyKind(StrEnum):
    """What is unusual."""

    PERFORMANCE_SPIKE = "performance_spike"
    """One step took much longer than those before it."""
    PERFORMANCE_DEGRADATION = "performance_degradation"
    """Steps take longer than at first, and keep doing so."""
    MEMORY_LEAK = "memory_leak"
    """A rank's memory grows steadily."""
    COMMUNICATION_BOTTLENECK = "communication_bottleneck"
    """Every rank spends most of its step waiting for others."""
    GPU_UNDERUTILIZATION = "gpu_underutilization"
    """A GPU idles most of the time."""
    IO_BOTTLENECK = "io_bottleneck"
    """Ranks wait for their data."""
    LOAD_IMBALANCE = "load_imbalance"
    """Ranks compute for very different times."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One episode that began."""

    kind: AnomalyKind
    severity: float
    """From 0 to 10."""
    message: str
    time: float
    rank: int | None = None
    step: int | None = None


MAKERS: dict[AnomalyKind, Callable[[], Detector]] = {
    AnomalyKind.PERFORMANCE_SPIKE: SpikeDetector,
    AnomalyKind.PERFORMANCE_DEGRADATION: LevelShiftDetector,
    AnomalyKind.MEMORY_LEAK: TrendDetector,
    AnomalyKind.COMMUNICATION_BOTTLENECK: lambda: SustainedDetector(0.5),
    AnomalyKind.GPU_UNDERUTILIZATION: lambda: SustainedDetector(0.6, is_above=False),
    AnomalyKind.IO_BOTTLENECK: lambda: SustainedDetector(0.2),
    AnomalyKind.LOAD_IMBALANCE: lambda: SustainedDetector(0.2),
}
"""The detector of each kind, and the limits: shares of a step for communication and data, of the time for a GPU, and
the variation (standard deviation over mean) of busy times for imbalance."""
_OF_STEPS = (
    (AnomalyKind.PERFORMANCE_SPIKE, ", far more than those before"),
    (AnomalyKind.PERFORMANCE_DEGRADATION, "; steps have become slower and stay so"),
)


class AnomalyWatch:
    """Attached to a JobView. `on_step` is called by it; call `tick` about once a second for what is not a step."""

    def __init__(self, view: JobView) -> None:
        self._view = view
        self._detectors: dict[tuple[AnomalyKind, str], Detector] = {}
        self._found: deque[Anomaly] = deque(maxlen=MAX_ANOMALIES)
        self._counts: Counter[str] = Counter()
        self._num_seen: dict[int, int] = {}
        self._first_rank = MAX_RANKS
        self._last_sequence: dict[int, int] = {}
        view.step_listeners.append(self.on_step)

    @property
    def found(self) -> list[Anomaly]:
        """The newest, oldest first."""
        return list(self._found)

    def to_rows(self) -> list[dict[str, Any]]:
        """JSON-ready."""
        return [asdict(anomaly) for anomaly in self._found]

    def values(self) -> dict[ValueKey, float]:
        """The counts, as metrics of the job."""
        return {("torsh_anomalies", (kind,)): float(count) for kind, count in self._counts.items()}

    def on_step(self, rank: int, step: StepRecord) -> None:
        """A rank has done a step; step times are the same on all ranks, so one of them is judged."""
        self._num_seen[rank] = self._num_seen.get(rank, 0) + 1
        if rank < self._first_rank:
            self._first_rank = rank
        if rank != self._first_rank or self._num_seen[rank] <= 2 or step.is_skipped:
            return  # the first steps allocate and compile
        for kind, rest in _OF_STEPS:
            severity = self._judged(kind, "", step.step_s)
            if severity is not None:
                told = f"step {step.step} took {step.step_s * 1e3:.1f} ms{rest}"
                self._note(kind, severity, told, step=step.step)

    def tick(self) -> None:
        """Judge what ranks told since the last tick."""
        with self._view.lock:
            heard = [view for view in self._view.ranks.values() if view.sequence != self._last_sequence.get(view.rank)]
            if not heard:
                return
            for view in heard:
                self._last_sequence[view.rank] = view.sequence
                for name in ("torsh_host_memory_bytes", "torsh_device_memory_bytes"):
                    value = view.number(name)
                    if value is None:
                        continue
                    severity = self._judged(AnomalyKind.MEMORY_LEAK, f"{name} {view.rank}", value)
                    if severity is not None:
                        what = "device memory" if "device" in name else "memory"
                        told = f"the {what} of rank {view.rank} grows steadily, to {value / 2**20:.0f} MB"
                        self._note(AnomalyKind.MEMORY_LEAK, severity, told, rank=view.rank)
                for (_, labels), gpu_use in view.values({"torsh_gpu_utilization_ratio"}):
                    if isinstance(gpu_use, float | int):
                        where = f"GPU {labels[0]} of {view.facts.get('node', 'a node')}"
                        told = f"{where} idles: it is busy {gpu_use:.0%} of the time"
                        self._judge(AnomalyKind.GPU_UNDERUTILIZATION, where, gpu_use, told)
            self._judge_shares()

    def _judge_shares(self) -> None:
        newest = [view.newest_steps(10) for view in self._view.ranks.values()]
        waits = [share_of_steps(steps, "wait_s") for steps in newest]
        known = [wait for wait in waits if wait is not None]
        if known and len(known) == len(waits):
            # If even the rank that waits least waits long, it is the network; else some rank is slow.
            told = f"every rank waits for the others for at least {min(known):.0%} of a step"
            self._judge(AnomalyKind.COMMUNICATION_BOTTLENECK, "", min(known), told)
        data = [share for steps in newest if (share := share_of_steps(steps, "data_s")) is not None]
        if data:
            told = f"a rank waits for its data for {max(data):.0%} of a step"
            self._judge(AnomalyKind.IO_BOTTLENECK, "", max(data), told)
        busy = [
            sum([step.busy_s for step in steps]) / len(steps)
            for steps in newest
            if steps and steps[-1].wait_s is not None
        ]
        mean = sum(busy) / len(busy) if busy else 0.0
        if len(busy) > 1 and mean > 0:
            # Not `statistics.pstdev`, which computes in fractions.
            variation = math.sqrt(sum([(one - mean) ** 2 for one in busy]) / len(busy)) / mean
            told = f"ranks compute between {min(busy) * 1e3:.1f} and {max(busy) * 1e3:.1f} ms a step"
            self._judge(AnomalyKind.LOAD_IMBALANCE, "", variation, told)

    def _judge(self, kind: AnomalyKind, series: str, value: float, message: str) -> None:
        severity = self._judged(kind, series, value)
        if severity is not None:
            self._note(kind, severity, message)

    def _judged(self, kind: AnomalyKind, series: str, value: float) -> float | None:
        """How severe it is that a series has this value now; None if it is not unusual."""
        detector = self._detectors.get((kind, series))
        if detector is None:
            if len(self._detectors) >= _MAX_SERIES:
                return None
            detector = self._detectors[kind, series] = MAKERS[kind]()
        return detector.add(value)

    def _note(
        self, kind: AnomalyKind, severity: float, message: str, *, rank: int | None = None, step: int | None = None
    ) -> None:
        self._counts[kind.value] += 1
        self._found.append(Anomaly(kind, severity, message, time.time(), rank, step))
