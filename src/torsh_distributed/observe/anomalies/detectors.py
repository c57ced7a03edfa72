"""Streaming detectors: each takes the values of one series, one at a time, and says when it becomes unusual.

The tested value is never part of its own baseline. All keep a bounded number of values. A severity lies between 0 and
10; a detector reports once when an episode begins and is ready again after it has ended.
"""

from __future__ import annotations

import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from typing_extensions import override

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
    `least_ratio` that lasts does. After an episode the baseline is taken anew.
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
