"""Convergence, stability and efficiency of a run so far; what was not recorded is absent. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torsh_distributed.observe.anomalies import robust_spread
from torsh_distributed.observe.job.job_view import CurvePoint, JobView

_LEAST_POINTS = 20
_NUM_BLOCKS = 20
_SPIKE = 8.0
_NEIGHBOURS = 10
_SURE = 2.0


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Where the loss goes in the second half of the run."""

    trend: str
    """improving, flat or rising; flat if two standard errors cover the change."""
    change_per_1000_steps: float
    """Of the loss."""
    error: float
    """Standard error of that change; neighbouring steps are alike, so it comes from means of blocks."""
    best_loss: float
    best_step: int


@dataclass(frozen=True, kw_only=True)
class Stability:
    """How calmly the loss goes there."""

    scatter: float | None
    """Robust spread of the loss around its course, relative to it."""
    num_spikes: int
    """Steps whose loss is far above their neighbours'."""
    num_nonfinite: int
    num_skipped: int


@dataclass(frozen=True, kw_only=True)
class CourseEfficiency:
    """What of the time went into training."""

    busy_share: float | None
    """Of a step: without waiting for ranks, data or stages. None where waiting is not measured."""
    goodput: float
    """Time in steps over the time since the job began, so start, restarts and stops count as lost."""
    samples_per_s: float | None
    samples_per_s_error: float | None
    """Standard error of it."""
    flops_per_s: float | None
    """Of all ranks that counted them."""
    mfu: float | None
    """Mean over the ranks."""


@dataclass(frozen=True, kw_only=True)
class TrainingCourse:
    """All of it; None for what the records do not tell."""

    convergence: Convergence | None
    stability: Stability | None
    efficiency: CourseEfficiency | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def training_course(view: JobView) -> TrainingCourse:
    """How training goes, over the points that the view has kept; takes some milliseconds."""
    with view.lock:
        points = view.curve.points()
        return TrainingCourse(
            convergence=_convergence([point for point in points if point.loss is not None]),
            stability=_stability(view, [point.loss for point in points if point.loss is not None]),
            efficiency=_efficiency(view, points),
        )


def block_means(points: Sequence[tuple[float, float]], num_blocks: int) -> list[tuple[float, float]]:
    """The points cut into blocks of equal numbers, each one its mean."""
    size = max(1, len(points) // num_blocks)
    blocks = [points[at : at + size] for at in range(0, len(points) - size + 1, size)]
    return [(statistics.fmean(x for x, _ in block), statistics.fmean(y for _, y in block)) for block in blocks if block]


def _convergence(points: Sequence[CurvePoint]) -> Convergence | None:
    if len(points) < _LEAST_POINTS:
        return None
    half = [(float(point.step), point.loss or 0.0) for point in points[len(points) // 2 :]]
    means = block_means(half, _NUM_BLOCKS)
    slope, error = _line(means)
    best = min(points, key=lambda point: point.loss if point.loss is not None else math.inf)
    trend = "flat" if abs(slope) <= _SURE * error else "improving" if slope < 0 else "rising"
    return Convergence(
        trend=trend,
        change_per_1000_steps=1000 * slope,
        error=1000 * error,
        best_loss=best.loss if best.loss is not None else math.nan,
        best_step=best.step,
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the line of least squares, and its standard error."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 0:
        return 0.0, math.inf
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, math.sqrt(rest / max(1, len(points) - 2) / spread)


def _stability(view: JobView, losses: Sequence[float]) -> Stability | None:
    if len(losses) < _LEAST_POINTS:
        return None
    rests, spreads = [], []
    for at in range(1, len(losses) - 1):
        around = [*losses[max(0, at - _NEIGHBOURS) : at], *losses[at + 1 : at + 1 + _NEIGHBOURS]]
        middle, near = robust_spread(around)
        rests.append(losses[at] - middle)
        spreads.append(near)
    _, spread = robust_spread(rests)
    # Where the loss falls steeply its neighbours differ much: that is no spike.
    num_spikes = sum(rest > _SPIKE * max(spread, near) > 0 for rest, near in zip(rests, spreads, strict=True))
    level = abs(statistics.median(losses))
    return Stability(
        scatter=spread / level if level else None,
        num_spikes=num_spikes,
        num_nonfinite=int(max(view.series("torsh_nonfinite_values", "torsh_loss").values(), default=0)),
        num_skipped=int(max(view.series("torsh_skipped_steps").values(), default=0)),
    )


def _efficiency(view: JobView, points: Sequence[CurvePoint]) -> CourseEfficiency | None:
    if len(points) < 2:
        return None
    steps = [step for rank in view.ranks.values() for step in list(rank.steps)[1:]]
    total_s = sum(step.step_s for step in steps)
    has_waits = bool(steps) and all(step.wait_s is not None for step in steps) and total_s > 0
    rates = [point.samples_per_s for point in points[1:] if point.samples_per_s is not None]
    flops, mfu = view.series("torsh_flops_per_second"), view.series("torsh_mfu_ratio")
    lived_s = (view.header.ended or points[-1].time) - view.header.started
    # Points are thinned, so the time in steps is their mean times the number of all.
    in_steps_s = statistics.fmean(point.step_s for point in points) * view.curve.num_added
    return CourseEfficiency(
        busy_share=sum(step.busy_s for step in steps) / total_s if has_waits else None,
        goodput=min(1.0, in_steps_s / lived_s) if lived_s > 0 else 0.0,
        samples_per_s=statistics.fmean(rates) if rates else None,
        samples_per_s_error=statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else None,
        flops_per_s=sum(flops.values()) if flops else None,
        mfu=statistics.fmean(mfu.values()) if mfu else None,
    )
