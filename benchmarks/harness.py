"""The parts of a case. A case yields rows, measured by the harness of `torsh bench`: ours and its rivals in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torsh_distributed.cli.bench.rivals.side_by_side import OURS, Row, SampleBudget, Workload, compare
from torsh_distributed.cli.bench.rivals.side_by_side import RowUnit as Unit
from torsh_distributed.cli.bench.rivals.side_by_side import SampleMedian as Measurement

__all__ = ["FULL", "OURS", "QUICK", "Budget", "Case", "Measurement", "Note", "Row", "Unit", "Workload", "compare"]


@dataclass(frozen=True, kw_only=True)
class Budget(SampleBudget):
    """How long to measure: `QUICK` shows that a case works, `FULL` is for results to keep."""

    name: str
    parts: tuple[str, ...] = ()
    """Parts of the case to measure; all of them if none is named."""

    def wants(self, part: str) -> bool:
        """Whether to measure this part of the case."""
        return not self.parts or part in self.parts

    @property
    def is_quick(self) -> bool:
        """Whether the numbers only show that the case works."""
        return self.name == "quick"


QUICK = Budget(name="quick", num_samples=3, sample_s=0.002)
FULL = Budget(name="full", num_samples=15, sample_s=0.05)


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something a reader of the numbers must know, such as a rival that could not run here and why."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """A benchmark: `benchmarks/cases/<name>.py` defines one as `CASE`."""

    title: str
    about: str
    """What is measured and how, in a few sentences; printed above the table."""
    rows: Callable[[Budget], Iterator[Row | Note]]
    x_label: str = ""
    """Name and unit of `Row.x`, if the case is drawn as curves."""
    parts: tuple[str, ...] = ()
    """Parts of a long case that can be measured by themselves (`--only`); notes on one begin with its name."""
