"""What past runs on this machine say about its predictions: measured over predicted, by part of a step. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PART_OF: Mapping[str, str] = {
    "forward": "compute",
    "backward": "compute",
    "recompute": "compute",
    "split layers": "wait",
    "gathering": "wait",
    "averaging": "wait",
    "compressing": "wait",
    "stages sending": "wait",
    "update": "optimizer",
    "bubble": "bubble",
}
"""Term of a predicted step to the part of a recorded step that it is seen in."""

PARTS = ("compute", "wait", "optimizer", "bubble")
_FEWEST = 3
"""Runs that say how much ratios vary."""
_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A recorded run: seconds of a step by part, as predicted from rates alone and as measured."""

    date: str
    what: str
    """Model and mesh."""
    num_ranks: int
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """The measured step."""
        return sum(self.measured_s.values())


@dataclass(frozen=True)
class PastRuns:
    """All recorded runs of a machine since its rates were measured."""

    runs: tuple[PastRun, ...] = ()

    def like(self, num_ranks: int) -> tuple[PastRun, ...]:
        """Those on so many ranks, which share the machine alike; all where there are none."""
        return tuple(one for one in self.runs if one.num_ranks == num_ranks) or self.runs

    def factors(self, num_ranks: int) -> dict[str, float]:
        """By part of a step: how many times as long as predicted it took; the median of runs."""
        return _factors(self.like(num_ranks))

    def interval(self, num_ranks: int) -> tuple[float, float] | None:
        """Between which multiples of a corrected prediction 90 % of runs are; None for fewer than three runs.

        Each run is predicted with the factors of the others, and logarithms of the ratios are taken to be normal: with
        few runs the interval is wider, as Student's distribution says.
        """
        runs = self.like(num_ranks)
        if len(runs) < _FEWEST:
            return None
        errors = []
        for place, run in enumerate(runs):
            others = (*runs[:place], *runs[place + 1 :])
            errors.append(math.log(run.total_s / corrected_s(run.predicted_s, _factors(others))))
        middle, around = statistics.fmean(errors), _student(len(errors) - 1) * statistics.stdev(errors)
        return math.exp(middle - around), math.exp(middle + around)


NO_RUNS = PastRuns()


def corrected_s(parts_s: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """The whole step with each part corrected."""
    return sum(seconds * factors.get(part, 1.0) for part, seconds in parts_s.items())


def parts_of(terms: Mapping[str, float]) -> dict[str, float]:
    """The terms of a predicted step by the part that they are seen in."""
    found = dict.fromkeys(PARTS, 0.0)
    for term, seconds in terms.items():
        found[PART_OF[term]] += seconds
    return found


def _factors(runs: Sequence[PastRun]) -> dict[str, float]:
    """A part that no run had, or that took no time, is left as it is."""
    found = {}
    for part in PARTS:
        ratios = [
            one.measured_s[part] / one.predicted_s[part]
            for one in runs
            if one.predicted_s.get(part, 0.0) > 0 and one.measured_s.get(part, 0.0) > 0
        ]
        if ratios:
            found[part] = statistics.median(ratios)
    return found


def _student(degrees: int) -> float:
    """The quantile of Student's distribution that leaves a twentieth above it, by its expansion around the normal."""
    z = statistics.NormalDist().inv_cdf((1 + _SHARE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
