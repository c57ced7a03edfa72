"""The parts of a case, and how they are measured.

A case yields rows; a row holds our measurement and those of the rivals, taken in turns in the same process tree,
so a machine that slows down affects all of them. Ratios are computed here, never written by a case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Workload = Callable[[], object]
OURS = "torsh"


class Unit(StrEnum):
    """What a number means, and so whether lower or higher is better."""

    SECONDS = "s"
    BYTES = "B"
    PER_SECOND = "1/s"
    BYTES_PER_SECOND = "B/s"
    LOSS = "loss"
    JOULES = "J"
    GRAMS = "g"
    ERROR = "off"
    """How far a prediction is from what was measured, as a share of that."""

    @property
    def is_lower_better(self) -> bool:
        """Times, sizes, losses, energy and grams should be small, rates large."""
        return self not in (Unit.PER_SECOND, Unit.BYTES_PER_SECOND)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to measure: `QUICK` shows that a case works, `FULL` is for results to keep."""

    name: str
    num_samples: int
    """Samples of each contestant; their median and spread are reported."""
    sample_s: float
    """A sample repeats a short workload until it lasts about this long, to be above the clock's noise."""
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
class Measurement:
    """The median of some samples, and the tenth and ninetieth percentile around it."""

    median: float
    low: float
    high: float
    num_samples: int
    samples: tuple[float, ...] = ()
    """All of them, where their distribution is to be kept and drawn."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Measurement:
        """Summarise at least one sample."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            median=statistics.median(ordered),
            low=ordered[round(0.1 * last)],
            high=ordered[round(0.9 * last)],
            num_samples=len(ordered),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a result: the same work done by us and by others."""

    name: str
    unit: Unit
    ours: Measurement
    rivals: Mapping[str, Measurement] = field(default_factory=dict)
    x: float | None = None
    """The row's place on the horizontal axis (a size, a number of ranks), for cases drawn as curves."""

    @property
    def ratios(self) -> dict[str, float]:
        """How many times better ours is than each rival; below 1 it is worse."""
        found = {}
        for name, rival in self.rivals.items():
            ours, theirs = self.ours.median, rival.median
            if min(ours, theirs) > 0:
                found[name] = theirs / ours if self.unit.is_lower_better else ours / theirs
        return found


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


def compare(
    name: str,
    ours: Workload,
    rivals: Mapping[str, Workload],
    *,
    budget: Budget,
    amount: float = 1.0,
    unit: Unit = Unit.SECONDS,
    x: float | None = None,
) -> Row:
    """Measure the workloads in turns. `amount` is what one call does: operations, events or bytes.

    With a time as unit the row holds seconds per `amount`, with a rate `amount` per second.
    """
    contestants = {OURS: ours, **rivals}
    loops = {who: _loops_per_sample(workload, budget.sample_s) for who, workload in contestants.items()}
    samples: dict[str, list[float]] = {who: [] for who in contestants}
    for _ in range(budget.num_samples):
        for who, workload in contestants.items():
            seconds = _time(workload, loops[who]) / loops[who]
            samples[who].append(seconds / amount if unit.is_lower_better else amount / seconds)
    measured = {who: Measurement.of(values) for who, values in samples.items()}
    return Row(name=name, unit=unit, ours=measured.pop(OURS), rivals=measured, x=x)


def _loops_per_sample(workload: Workload, sample_s: float) -> int:
    """Warm up the workload and find how often it must run to last `sample_s`."""
    loops = 1
    while (took_s := _time(workload, loops)) < sample_s:
        loops *= 2 if took_s <= 0 else max(2, min(10, round(sample_s / took_s)))
    return loops


def _time(workload: Workload, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        workload()
    return time.perf_counter() - start
