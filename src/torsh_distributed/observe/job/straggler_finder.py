"""Names the ranks that the others wait for.

In synchronous training every rank's step takes equally long; the slow one is the one that does not wait. So ranks are
compared by their own time: the step without waiting for ranks and data, and without what other processes took of the
core. A rank is named when that exceeds the median of the others

- in four of its five newest steps, by `threshold`, by more than the usual scatter, and by more than it ever did for as
  long in the last hundreds of steps: a machine that is busy now and then is not a slow rank; or
- in three quarters of its newest 32 steps by `threshold`, whatever the scatter is.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

_WINDOW = 5
_LONG_WINDOW = 32
_LONG_SHARE = 0.75
_LONG_EVERY = 4
_ENDS_WITHIN = 8
_USUAL = 60
_STEPS_WAITED_FOR = 512
"""A summary of a rank brings up to 200 steps, and another rank's may come a summary later."""
_TIMES_WAITED_FOR = 100_000
_LEAST_WAITED_FOR = 16
_NOISE_FACTOR = 5.5
_PEAK_FACTOR = 1.5
_PEAK_DECAY = 0.9995
"""Of what is remembered of a peak, per step: half of it after 1400."""
_EARLY_SCATTER = 0.06
"""Assumed before a rank's own is known: six percent."""
_EARLY = 2 * _WINDOW
_MANY_RANKS = 6
_LEAST_BUSY_S = 1e-4


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    since_step: int
    slowdown: float
    """Its own time over the median of the others, minus one: 0.3 is 30 % slower."""
    named_step: int
    """The step after which it was named."""


class _RankCourse:
    """How one rank compared with the others, as logarithms of the ratio, newest last."""

    __slots__ = ("newest", "peak", "pending", "usual")

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=_LONG_WINDOW)
        self.usual: deque[float] = deque(maxlen=_USUAL)
        """Before the window, while it was not named."""
        self.pending: deque[float] = deque(maxlen=_WINDOW)
        """By how much four of five steps were slower, of the windows that overlap the newest."""
        self.peak = 0.0
        """The largest of those before them, less with every step."""


class StragglerFinder:
    """Takes every rank's own time of every step, in any order between ranks; `stragglers` is who is slow now."""

    def __init__(self, *, threshold: float = 0.15) -> None:
        self._least_excess = math.log1p(threshold)
        self._waiting: dict[int, dict[int, float]] = {}
        self._given_up = -1
        self._courses: dict[int, _RankCourse] = {}
        self._found: dict[int, Straggler] = {}
        self._newly_named: list[Straggler] = []

    def take_newly_named(self) -> list[Straggler]:
        """Those named since the last call."""
        named, self._newly_named = self._newly_named, []
        return named

    @property
    def stragglers(self) -> list[Straggler]:
        """Those named now, the slowest first."""
        return sorted(self._found.values(), key=lambda one: -one.slowdown)

    def add(self, rank: int, step: int, busy_s: float, *, num_ranks: int) -> None:
        """A rank's own time in a step; a step is judged once all `num_ranks` have told theirs."""
        if num_ranks < 2 or not 0 < busy_s < math.inf or step <= self._given_up:
            return
        told = self._waiting.get(step)
        if told is None:
            told = self._waiting[step] = {}
        told[rank] = busy_s
        if len(told) >= num_ranks:
            self._judge(step, self._waiting.pop(step))
        if len(self._waiting) <= _LEAST_WAITED_FOR:
            return
        while len(self._waiting) > min(_STEPS_WAITED_FOR, max(_LEAST_WAITED_FOR, _TIMES_WAITED_FOR // num_ranks)):
            # The oldest step, not the one that was told of first: a late rank tells of older ones.
            self._given_up = min(self._waiting)
            del self._waiting[self._given_up]

    def _judge(self, step: int, busy: Mapping[int, float]) -> None:
        excesses = _excesses(busy)
        # Many ranks show the scatter of a single step; of a few, one slow rank would be all of it.
        common = _deviation(list(excesses.values())) if len(busy) >= _MANY_RANKS else 0.0
        suspicious = 0.5 * self._least_excess
        found, courses = self._found, self._courses
        for rank, excess in excesses.items():
            course = courses.get(rank)
            if course is None:
                course = courses[rank] = _RankCourse()
            newest, pending = course.newest, course.pending
            newest.append(excess)
            if len(newest) < _WINDOW:
                continue
            one, two, three, four = newest[-2], newest[-3], newest[-4], newest[-5]
            # The mean without the largest and the smallest: one slow step is never enough, one quick one no excuse.
            low, high = min(excess, one, two, three, four), max(excess, one, two, three, four)
            middle = (excess + one + two + three + four - low - high) / 3
            is_found = rank in found
            if not is_found and len(newest) > _WINDOW:
                # What leaves the window becomes part of what is usual, unless the rank is named.
                course.usual.append(newest[-_WINDOW - 1])
                peak = course.peak * _PEAK_DECAY
                course.peak = pending[0] if len(pending) == _WINDOW and pending[0] > peak else peak
            if not is_found and middle <= suspicious:
                pending.append(0.0)
                continue
            lowest = sorted((excess, one, two, three, four))[1]
            pending.append(lowest)
            if is_found:
                course.peak = max(course.peak, lowest)
            self._decide(rank, step, course, middle, common)

    def _decide(self, rank: int, step: int, course: _RankCourse, middle: float, common: float) -> None:
        newest = list(course.newest)
        named = self._found.get(rank)
        if named is not None:
            now = statistics.median(newest[-_ENDS_WITHIN:])
            if now < self._least_excess / 2:
                del self._found[rank]
            else:
                self._found[rank] = Straggler(rank, named.since_step, math.expm1(now), named.named_step)
            return
        length, is_slow = _WINDOW, self._is_slow(sorted(newest[-_WINDOW:]), middle, course, common)
        if not is_slow and step % _LONG_EVERY == 0 and len(newest) == _LONG_WINDOW:
            length, is_slow = _LONG_WINDOW, sorted(newest)[int((1 - _LONG_SHARE) * _LONG_WINDOW)] > self._least_excess
        if not is_slow:
            return
        # Those of the window before the first slow step were as quick as ever.
        slow = next(at for at, excess in enumerate(newest[-length:]) if excess > self._least_excess / 2)
        middle = middle if length == _WINDOW else statistics.median(newest)
        self._found[rank] = Straggler(rank, step - length + 1 + slow, math.expm1(middle), step)
        self._newly_named.append(self._found[rank])

    def _is_slow(self, window: list[float], middle: float, course: _RankCourse, common: float) -> bool:
        """Whether five steps, sorted, are slow beyond chance; `middle` is the mean of the inner three."""
        if len(course.usual) < _EARLY:
            # Before anything is known of a rank, each of its steps must be slow.
            scatter, is_persistent = _EARLY_SCATTER, window[0] > self._least_excess
        else:
            scatter = _deviation(list(course.usual))
            is_persistent = window[1] > max(self._least_excess / 2, _PEAK_FACTOR * course.peak)
        return is_persistent and middle > max(
            self._least_excess, _NOISE_FACTOR * max(scatter, common) / math.sqrt(_WINDOW)
        )


def _excesses(busy: Mapping[int, float]) -> dict[int, float]:
    """By rank, the logarithm of its time over the median of the others."""
    log = math.log
    ordered = sorted(busy.values())
    if len(busy) >= _MANY_RANKS:  # the median of all, which one rank hardly moves
        level = log(max(statistics.median(ordered), _LEAST_BUSY_S))
        return {rank: log(mine if mine > _LEAST_BUSY_S else _LEAST_BUSY_S) - level for rank, mine in busy.items()}
    return {
        rank: log(max(mine, _LEAST_BUSY_S) / max(_median_without(ordered, mine), _LEAST_BUSY_S))
        for rank, mine in busy.items()
    }


def _median_without(ordered: list[float], one: float) -> float:
    """The median of a sorted list without one of its values."""
    place, size = bisect_left(ordered, one), len(ordered) - 1

    def at(index: int) -> float:
        return ordered[index if index < place else index + 1]

    return at(size // 2) if size % 2 else (at(size // 2 - 1) + at(size // 2)) / 2


def _deviation(values: list[float]) -> float:
    """The standard deviation that the median deviation from the middle stands for."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)
