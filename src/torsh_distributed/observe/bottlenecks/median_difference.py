"""Whether one way of running is faster than another: the difference of medians, with an interval. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_RESAMPLES = 2000

Rounds = Sequence[Sequence[float]]
"""Seconds of the steps of each round."""


class MedianDifference(NamedTuple):
    """Median before minus median after, in seconds, and its 95 % interval."""

    gain_s: float
    low_s: float
    high_s: float


def median_difference(before: Rounds, after: Rounds) -> MedianDifference:
    """What a step has gained: rounds are resampled, and the steps in them."""
    source = random.Random(0)

    def drawn(runs: Rounds, rounds: list[int]) -> float:
        return statistics.median([step for at in rounds for step in source.choices(runs[at], k=len(runs[at]))])

    differences = []
    for _ in range(_RESAMPLES):
        rounds = source.choices(range(len(before)), k=len(before))
        differences.append(drawn(before, rounds) - drawn(after, rounds))
    differences.sort()
    low_s, high_s = differences[int(0.025 * _RESAMPLES)], differences[int(0.975 * _RESAMPLES) - 1]
    return MedianDifference(median_of(before) - median_of(after), low_s, high_s)


def median_of(rounds: Rounds) -> float:
    """Of all steps of all rounds."""
    return statistics.median([step for steps in rounds for step in steps])
