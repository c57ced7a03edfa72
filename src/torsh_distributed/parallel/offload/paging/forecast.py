"""Predicts which units are used next from the order of the last step, and how far ahead to fetch."""

from __future__ import annotations

import math
from collections.abc import Sequence

_RAISE_ABOVE, _LOWER_BELOW = 0.9, 0.7
_RAISE_BY, _LOWER_BY = 1.5, 0.7


class Forecast:
    """Predicts uses of units (by index) from the previous step; for the first step, from the caller's `guess`."""

    def __init__(self, guess: Sequence[int], *, max_distance: int) -> None:
        self._learned = list(guess)
        self._seen: list[int] = []
        self._place = 0
        """The step's present position in the learned order."""
        self._max_distance = max_distance
        self._distance = float(min(2, max_distance))
        self._num_hits = 0

    @property
    def distance(self) -> int:
        """How many uses ahead to fetch; 0 fetches on demand."""
        return math.floor(self._distance)

    def note(self, index: int, *, is_hit: bool) -> None:
        """Record that unit `index` is used now; a hit is one that was fetched before."""
        self._seen.append(index)
        self._num_hits += is_hit
        if index in self._learned[self._place :]:
            self._place = self._learned.index(index, self._place) + 1

    def upcoming(self) -> list[int]:
        """The next uses within the distance, soonest first; not beyond this step, because the update follows it."""
        return self._learned[self._place : self._place + self.distance]

    def uses_until(self, index: int) -> float:
        """How many uses come before that of unit `index`, also in the next step; infinite if it is not predicted."""
        ahead = self._learned[self._place :] + self._learned[: self._place]
        return ahead.index(index) if index in ahead else math.inf

    def end_step(self) -> None:
        """Learn this step's order; increase the distance if most uses were hits, decrease it if few were."""
        if not self._seen:
            return
        hit_rate = self._num_hits / len(self._seen)
        if hit_rate > _RAISE_ABOVE:
            self._distance *= _RAISE_BY
        elif hit_rate < _LOWER_BELOW:
            self._distance *= _LOWER_BY
        self._distance = min(max(self._distance, 1.0), float(self._max_distance))
        self._learned, self._seen, self._place, self._num_hits = self._seen, [], 0, 0

    def shrink(self, factor: float) -> None:
        """Multiply the distance by `factor`, because memory is short."""
        self._distance = min(max(1.0, self._distance * factor), float(self._max_distance))
