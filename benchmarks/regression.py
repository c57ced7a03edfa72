"""What has become worse since an earlier result, told from noise.

Two runs on a busy machine differ by more than a change does. So what is compared is how many times better ours is than
a rival that was measured in turns with it, which a slower machine leaves as it is, and a change counts if its whole
interval is beyond a tolerance, and again so in every repetition. Rows without a rival are compared on like machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness import OURS, Measurement, Row
from benchmarks.result import Result

TOLERANCE = 0.1
REPETITIONS = 3
_Z = 2.576
"""Of a normal distribution: 99 % lie within this many standard errors."""
_SPREAD_OF_NORMAL = 2.563
"""Standard deviations between the tenth and the ninetieth percentile."""
_ERROR_OF_MEDIAN = 1.2533
"""The standard error of a median, relative to that of a mean."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a row compares with what it was: factors above 1 are better; the interval holds the true one at 99 %."""

    row: str
    against: str
    """The rival whose ratio is compared, or ours where the numbers themselves are."""
    factor: float
    low: float
    high: float

    def is_worse(self, tolerance: float) -> bool:
        """Whether it is worse by more than the tolerance, whatever the noise."""
        return self.high < 1 - tolerance

    def is_better(self, tolerance: float) -> bool:
        """Whether it is better by more than the tolerance, whatever the noise."""
        return self.low > 1 / (1 - tolerance)


def changes_between(now: Result, earlier: Result) -> list[Change]:
    """Every row that both have, against each rival of both; without one, its number if the machines are alike."""
    before, found = {row.name: row for row in earlier.rows}, list[Change]()
    for row in now.rows:
        old = before.get(row.name)
        if old is None or old.unit is not row.unit:
            continue
        for rival in row.rivals.keys() & old.rivals.keys():
            found += _changed(row, rival, [row.ours, old.ours], [row.rivals[rival], old.rivals[rival]])
        if not row.rivals and now.machine.is_like(earlier.machine):
            found += _changed(row, OURS, [row.ours, old.ours], [])
    return found


def lasting(measure: Callable[[], Result], earlier: Result, *, tolerance: float = TOLERANCE) -> list[Change]:
    """The changes of the last measurement; what is worse in one and not in a repetition was noise, and left out.

    `measure` is called again while something is worse, a few times at most.
    """
    suspects: set[tuple[str, str]] | None = None
    found: list[Change] = []
    for _ in range(REPETITIONS):
        found = changes_between(measure(), earlier)
        worse = {(one.row, one.against) for one in found if one.is_worse(tolerance)}
        suspects = worse if suspects is None else suspects & worse
        if not suspects:
            break
    return [one for one in found if not one.is_worse(tolerance) or (one.row, one.against) in (suspects or ())]


def _changed(row: Row, against: str, ours: Sequence[Measurement], rivals: Sequence[Measurement]) -> list[Change]:
    """The change of ours relative to the rival's, each as now and before; nothing where a number is not above 0."""
    measured = [*ours, *rivals]
    if min(one.low for one in measured) <= 0:
        return []
    change = math.log(ours[0].median / ours[1].median)
    if rivals:
        change -= math.log(rivals[0].median / rivals[1].median)
    gain = -change if row.unit.is_lower_better else change
    error = _Z * math.sqrt(sum(_log_error(one) ** 2 for one in measured))
    return [
        Change(
            row=row.name,
            against=against,
            factor=math.exp(gain),
            low=math.exp(gain - error),
            high=math.exp(gain + error),
        )
    ]


def _log_error(one: Measurement) -> float:
    """The standard error of the logarithm of a median."""
    spread = math.log(one.high / one.low) / _SPREAD_OF_NORMAL
    return _ERROR_OF_MEDIAN * spread / math.sqrt(one.num_samples)
