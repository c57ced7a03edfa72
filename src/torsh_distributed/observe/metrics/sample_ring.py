"""The newest values of a metric, in bounded memory, and their statistics."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RING_SIZE = 512


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """Statistics of the values in a ring."""

    num_samples: int
    mean: float
    std: float
    """Of the population."""
    low: float
    median: float
    p95: float
    p99: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> SampleStatistics | None:
        """Those of some finite values; None without any."""
        ordered = sorted(values)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        return cls(
            num_samples=len(ordered),
            mean=mean,
            std=math.dist(ordered, (mean,) * len(ordered)) / math.sqrt(len(ordered)),
            low=ordered[0],
            median=percentile(ordered, 50),
            p95=percentile(ordered, 95),
            p99=percentile(ordered, 99),
            high=ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of all do not exceed, interpolated as numpy does; `ordered` is sorted, not empty."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class SampleRing:
    """The newest values, and count, sum and bucket counts of all. Not thread-safe: one thread adds."""

    def __init__(self, bounds: Sequence[float], *, size: int = RING_SIZE) -> None:
        self._bounds = bounds
        self._newest: deque[float] = deque(maxlen=size)
        self.count = 0
        self.total = 0.0
        self.bucket_counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        """Add a finite value."""
        self.extend((value,))

    def extend(self, values: Sequence[float], *, is_counted: bool = True) -> None:
        """Add finite values; without `is_counted` no buckets are, for what is shown without them."""
        self._newest.extend(values)
        self.count += len(values)
        self.total += sum(values)
        if is_counted:
            for value in values:
                self.bucket_counts[bisect_left(self._bounds, value)] += 1

    @property
    def newest(self) -> tuple[float, ...]:
        """Oldest first."""
        return tuple(self._newest)

    def statistics(self) -> SampleStatistics | None:
        """Of the newest values; None without any."""
        return SampleStatistics.of(self._newest)
