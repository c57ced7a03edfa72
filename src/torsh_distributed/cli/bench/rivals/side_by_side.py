"""Workloads measured in turns, and the rows that this gives; the repository's benchmarks use it too.

Ours and its rivals take turns in the same processes, so a machine that slows down affects all of them. Ratios are
computed here, never written by who measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Workload = Callable[[], object]
Timed = Callable[[Workload, int], float]
"""Seconds that so many calls of a workload take."""
OURS = "torsh"


class RowUnit(StrEnum):
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
    COUNT = "n"
    """Whole numbers of what should be few: collectives, steps."""

    @property
    def is_lower_better(self) -> bool:
        """Times, sizes, losses, energy, grams and counts should be small, rates large."""
        return self not in (RowUnit.PER_SECOND, RowUnit.BYTES_PER_SECOND)


@dataclass(frozen=True, kw_only=True)
class SampleBudget:
    """How long to measure."""

    num_samples: int
    """Samples of each contestant; their median and spread are reported."""
    sample_s: float
    """A sample repeats a short workload until it lasts about this long, to be above the clock's noise."""


@dataclass(frozen=True, kw_only=True)
class SampleMedian:
    """The median of some samples, and the tenth and ninetieth percentile around it."""

    median: float
    low: float
    high: float
    num_samples: int
    samples: tuple[float, ...] = ()
    """All of them, where their distribution is to be kept and drawn."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> SampleMedian:
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
    unit: RowUnit
    ours: SampleMedian
    rivals: Mapping[str, SampleMedian] = field(default_factory=dict)
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


def row_from(record: Mapping[str, Any]) -> Row:
    """A row from the dictionary that it was written as."""
    return Row(
        name=record["name"],
        unit=RowUnit(record["unit"]),
        ours=_measured_from(record["ours"]),
        rivals={name: _measured_from(rival) for name, rival in record["rivals"].items()},
        x=record["x"],
    )


def _measured_from(record: Mapping[str, Any]) -> SampleMedian:
    return SampleMedian(**{**record, "samples": tuple(record.get("samples", ()))})


def time_here(workload: Workload, loops: int) -> float:
    """Seconds that the calls take in this process."""
    start = time.perf_counter()
    for _ in range(loops):
        workload()
    return time.perf_counter() - start


def compare(
    name: str,
    ours: Workload,
    rivals: Mapping[str, Workload],
    *,
    budget: SampleBudget,
    amount: float = 1.0,
    unit: RowUnit = RowUnit.SECONDS,
    x: float | None = None,
    timed: Timed = time_here,
) -> Row:
    """Measure the workloads in turns. `amount` is what one call does: operations, events or bytes.

    With a time as unit the row holds seconds per `amount`, with a rate `amount` per second. Where ranks measure
    together, every rank calls this, and `timed` returns the same number on all of them, so all make the same calls.
    """
    contestants = {OURS: ours, **rivals}
    loops = {who: _loops_per_sample(workload, budget.sample_s, timed) for who, workload in contestants.items()}
    samples: dict[str, list[float]] = {who: [] for who in contestants}
    for _ in range(budget.num_samples):
        for who, workload in contestants.items():
            seconds = timed(workload, loops[who]) / loops[who]
            samples[who].append(seconds / amount if unit.is_lower_better else amount / seconds)
    measured = {who: SampleMedian.of(values) for who, values in samples.items()}
    return Row(name=name, unit=unit, ours=measured.pop(OURS), rivals=measured, x=x)


def _loops_per_sample(workload: Workload, sample_s: float, timed: Timed) -> int:
    """Warm up the workload and find how often it must run to last `sample_s`."""
    loops = 1
    while (took_s := timed(workload, loops)) < sample_s:
        loops *= 2 if took_s <= 0 else max(2, min(10, round(sample_s / took_s)))
    return loops
