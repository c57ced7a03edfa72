"""Names the ranks that the others wait for.

In synchronous training every rank's step takes equally long; the slow one is the one that does not wait. So ranks are
compared by their busy time: the step without waiting for ranks and data. A rank is named when its busy time exceeds
the median of the others by `threshold` in each of the newest steps, and by more than its usual scatter.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

_WINDOW = 4
_USUAL = 60
_STEPS_WAITED_FOR = 512
"""A summary of a rank brings up to 200 steps, and another rank's may come a summary later."""
_TIMES_WAITED_FOR = 100_000
_NOISE_FACTOR = 4.5
_EARLY_SCATTER = 0.06
"""Assumed before a rank's own is known: six percent."""
_MANY_RANKS = 6
_LEAST_BUSY_S = 1e-4


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    since_step: int
    slowdown: float
    """Its busy time over the median of the others, minus one: 0.3 is 30 % slower."""


class StragglerFinder:
    """Takes every rank's busy time of every step, in any order between ranks; `stragglers` is who is slow now."""

    def __init__(self, *, threshold: float = 0.15) -> None:
        self._least_excess = math.log1p(threshold)
        self._waiting: dict[int, dict[int, float]] = {}
        self._given_up = -1
        self._newest: dict[int, deque[float]] = {}
        self._usual: dict[int, deque[float]] = {}
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
        """A rank's busy time in a step; a step is judged once all `num_ranks` have told theirs."""
        if num_ranks < 2 or not math.isfinite(busy_s) or busy_s <= 0 or step <= self._given_up:
            return
        told = self._waiting.setdefault(step, {})
        told[rank] = busy_s
        if len(told) >= num_ranks:
            self._judge(step, self._waiting.pop(step))
        while len(self._waiting) > min(_STEPS_WAITED_FOR, max(16, _TIMES_WAITED_FOR // num_ranks)):
            # The oldest step, not the one that was told of first: a late rank tells of older ones.
            self._given_up = min(self._waiting)
            del self._waiting[self._given_up]

    def _judge(self, step: int, busy: Mapping[int, float]) -> None:
        ordered = sorted(busy.values())
        excesses = {
            rank: math.log(max(mine, _LEAST_BUSY_S) / max(_median_without(ordered, mine), _LEAST_BUSY_S))
            for rank, mine in busy.items()
        }
        # Many ranks show the scatter of a single step; of a few, one slow rank would be all of it.
        common = _deviation(list(excesses.values())) if len(busy) >= _MANY_RANKS else 0.0
        for rank, excess in excesses.items():
            newest = self._newest.setdefault(rank, deque(maxlen=_WINDOW))
            usual = self._usual.setdefault(rank, deque(maxlen=_USUAL))
            if len(newest) == _WINDOW and rank not in self._found:
                # What leaves the window becomes part of what is usual, unless the rank is being watched.
                usual.append(newest[0])
            newest.append(excess)
            if len(newest) == _WINDOW and (rank in self._found or sum(newest) > 0.5 * _WINDOW * self._least_excess):
                own = _deviation(list(usual)) if len(usual) >= _WINDOW * 2 else _EARLY_SCATTER
                self._decide(rank, step, newest, max(own, common))

    def _decide(self, rank: int, step: int, newest: deque[float], scatter: float) -> None:
        limit = max(self._least_excess, _NOISE_FACTOR * scatter / math.sqrt(_WINDOW))
        # The mean of the window without its largest and smallest: one slow step is never enough.
        middle = statistics.fmean(sorted(newest)[1:-1])
        if middle > limit and min(newest) > self._least_excess / 2:
            since = self._found[rank].since_step if rank in self._found else step - _WINDOW + 1
            is_new = rank not in self._found
            self._found[rank] = Straggler(rank, since, math.expm1(middle))
            if is_new:
                self._newly_named.append(self._found[rank])
        elif rank in self._found and middle < limit / 2:
            del self._found[rank]


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
