"""What has become worse since an earlier result, told from noise.

Two runs on a busy machine differ by more than a change does. So what is compared is how many times better ours is than
a rival that was measured in turns with it, which a slower machine leaves as it is, and a change counts if its whole
interval is beyond a tolerance, and again so in every repetition. Rows without a rival are compared on like machines.
Counts need neither: whatever the machine, the same code and the same torch make as many collectives, or nearly as many
operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness import OURS, Measurement, Row, Unit
from benchmarks.result import Result

TOLERANCE = 0.1
COMMIT_TOLERANCE = 0.5
"""Against an earlier commit, by quick runs on a machine that is not quiet: what takes twice as long is no noise."""
COUNT_TOLERANCE = 0.02
"""Of counts without a rival: whether a sum is there before somebody waits for it changes a few of a thousand."""
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

    case: str
    row: str
    against: str
    """The rival whose ratio is compared, or ours where the numbers themselves are."""
    factor: float
    low: float
    high: float
    is_count: bool = False
    """Whether it is the same on every machine, and so held to `COUNT_TOLERANCE`."""

    def is_worse(self, tolerance: float) -> bool:
        """Whether it is worse by more than the tolerance, whatever the noise."""
        return self.high < 1 - self._allowed(tolerance)

    def is_better(self, tolerance: float) -> bool:
        """Whether it is better by more than the tolerance, whatever the noise."""
        return self.low > 1 / (1 - self._allowed(tolerance))

    def _allowed(self, tolerance: float) -> float:
        return min(tolerance, COUNT_TOLERANCE) if self.is_count else tolerance


def changes_between(now: Result, earlier: Result) -> list[Change]:
    """Every row that both have, against each rival of both; without one, its number if the machines are alike.

    Counts without a rival are compared wherever torch is the same: what it does in a step changes with its version.
    """
    before, found = {row.name: row for row in earlier.rows}, list[Change]()
    for row in now.rows:
        old = before.get(row.name)
        if old is None or old.unit is not row.unit:
            continue
        for rival in row.rivals.keys() & old.rivals.keys():
            found += _changed(now.case, row, rival, [row.ours, old.ours], [row.rivals[rival], old.rivals[rival]])
        is_comparable = now.machine.has_same_torch(earlier.machine) and (
            row.unit is Unit.COUNT or now.machine.is_like(earlier.machine)
        )
        if not row.rivals and is_comparable:
            found += _changed(now.case, row, OURS, [row.ours, old.ours], [])
    return found


def lasting(
    measure: Callable[[Sequence[str]], Iterable[tuple[Result, Result]]],
    cases: Sequence[str],
    *,
    tolerance: float = TOLERANCE,
    needs_rival: bool = False,
) -> list[Change]:
    """The last change of every row; what is worse in one measurement and not in a repetition was noise, and left out.

    `measure` gives the result of each named case with the earlier one; it is called again, a few times at most, for the
    cases in which something is worse. `needs_rival` leaves out rows that have none, except counts.
    """
    suspects: set[tuple[str, str, str]] | None = None
    last: dict[tuple[str, str, str], Change] = {}
    wanted = list(cases)
    for _ in range(REPETITIONS):
        found = {_where(one): one for now, earlier in measure(wanted) for one in changes_between(now, earlier)}
        last |= {where: one for where, one in found.items() if one.against != OURS or one.is_count or not needs_rival}
        worse = {where for where in found.keys() & last.keys() if last[where].is_worse(tolerance)}
        suspects = worse if suspects is None else suspects & worse
        wanted = [case for case in wanted if case in {suspect[0] for suspect in suspects}]
        if not wanted:
            break
    return [one for where, one in last.items() if not one.is_worse(tolerance) or where in (suspects or ())]


def _where(one: Change) -> tuple[str, str, str]:
    return one.case, one.row, one.against


def _changed(
    case: str, row: Row, against: str, ours: Sequence[Measurement], rivals: Sequence[Measurement]
) -> list[Change]:
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
            case=case,
            row=row.name,
            against=against,
            factor=math.exp(gain),
            low=math.exp(gain - error),
            high=math.exp(gain + error),
            is_count=row.unit is Unit.COUNT and not rivals,
        )
    ]


def _log_error(one: Measurement) -> float:
    """The standard error of the logarithm of a median."""
    spread = math.log(one.high / one.low) / _SPREAD_OF_NORMAL
    return _ERROR_OF_MEDIAN * spread / math.sqrt(one.num_samples)
