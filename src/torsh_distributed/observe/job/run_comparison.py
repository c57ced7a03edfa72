"""Two runs compared: what was measured in both, with the scatter of each, so a difference can be told from noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torsh_distributed.observe.job.energy_summary import EnergySummary
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.metrics.sample_ring import SampleStatistics
from torsh_distributed.observe.metrics.step_record import PARTS, StepRecord

_LARGE_Z = 3.0


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A mean, the standard error of it, and how many values it comes from."""

    mean: float
    error: float
    count: int


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One quantity of both runs; None where a run did not measure it."""

    what: str
    unit: str
    first: ComparedFigure | None
    second: ComparedFigure | None

    @property
    def difference(self) -> str:
        """The change from the first to the second in words; `within noise` if three standard errors cover it."""
        one, other = self.first, self.second
        if one is None or other is None:
            return "not measured in both"
        change = other.mean - one.mean
        error = math.hypot(one.error, other.error)
        if min(one.count, other.count) > 1 and abs(change) <= _LARGE_Z * error:
            return "within noise"
        return f"{change / one.mean:+.1%}" if one.mean else f"{change:+.4g}"

    def show(self, figure: ComparedFigure | None) -> str:
        """A figure with its unit."""
        if figure is None:
            return "-"
        factor, unit = (1e3, " ms") if self.unit == "s" else (1.0, f" {self.unit}" if self.unit else "")
        error = f" ± {figure.error * factor:.2g}" if figure.count > 1 else ""
        return f"{figure.mean * factor:.4g}{error}{unit}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "difference": self.difference}


def compare_runs(one: JobView, other: JobView) -> list[ComparisonRow]:
    """Every quantity that at least one run has, over the newest steps of all its ranks."""
    rows = [
        ComparisonRow("ranks", "", _count(len(one.ranks)), _count(len(other.ranks))),
        ComparisonRow("steps", "", _count(one.curve.num_added), _count(other.curve.num_added)),
        ComparisonRow("loss at the end", "", _loss(one), _loss(other)),
        ComparisonRow("samples per second", "", _rate(one), _rate(other)),
        ComparisonRow("step time", "s", _figure(one, "step_s"), _figure(other, "step_s")),
        ComparisonRow("busy time", "s", _figure(one, "busy_s"), _figure(other, "busy_s")),
    ]
    rows += [ComparisonRow(part, "s", _figure(one, f"{part}_s"), _figure(other, f"{part}_s")) for part in PARTS]
    energy = one.energy.summary(), other.energy.summary()
    for what, unit, value in _ENERGY:
        rows.append(ComparisonRow(what, unit, *(_only(None if found is None else value(found)) for found in energy)))
    return [row for row in rows if row.first is not None or row.second is not None]


_ENERGY: tuple[tuple[str, str, Callable[[EnergySummary], float | None]], ...] = (
    ("energy", "J", lambda found: found.total_j),
    ("measured share of it", "%", lambda found: 100 * found.measured_j / found.total_j if found.total_j else None),
    ("energy a step", "J", lambda found: found.joules_per_step),
    ("energy a sample", "J", lambda found: found.joules_per_sample),
    ("energy lost", "J", lambda found: found.wasted_j),
    ("mean power", "W", lambda found: found.mean_w),
    ("CO2", "g", lambda found: found.grams),
)


def _steps(view: JobView) -> list[StepRecord]:
    # The first step of a process allocates and compiles: it says nothing about the others.
    return [step for rank in view.ranks.values() for step in list(rank.steps)[1:] if not step.is_skipped]


def _figure(view: JobView, name: str) -> ComparedFigure | None:
    return _of([value for step in _steps(view) if (value := getattr(step, name)) is not None])


def _loss(view: JobView) -> ComparedFigure | None:
    losses = [point.loss for point in view.curve.points()[-20:] if point.loss is not None]
    return _of(losses)


def _rate(view: JobView) -> ComparedFigure | None:
    rates = [point.samples_per_s for point in view.curve.points()[1:] if point.samples_per_s is not None]
    return _of(rates)


def _only(value: float | None) -> ComparedFigure | None:
    return None if value is None else ComparedFigure(value, 0.0, 1)


def _count(number: int) -> ComparedFigure:
    return ComparedFigure(float(number), 0.0, 1)


def _of(values: Sequence[float]) -> ComparedFigure | None:
    found = SampleStatistics.of(values)
    if found is None:
        return None
    return ComparedFigure(found.mean, found.std / math.sqrt(found.num_samples), found.num_samples)
