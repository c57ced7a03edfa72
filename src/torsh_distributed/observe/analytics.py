"""How training goes, from what a run recorded: `training_course` looks back, `forecast_loss` ahead with error bars.

When the loss will reach a target, what it takes and what it costs: with error bars, or not at all. Pure.
The course of a loss is taken for a power law that ends at a floor, `floor + scale * step ** -power`. Its error bars
come from fitting it again to courses made of the fitted one and the scatter around it, in blocks, because neighbouring
steps are alike. A target that most of these courses do not reach soon has no forecast.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.anomalies import robust_spread
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.training_curve import CurvePoint

_LEAST_FIT_POINTS = 60
_NUM_FIT_BLOCKS = 60
_NUM_FLOORS = 12
_DEPTHS = (-2.0, 1.5)
_NUM_COURSES = 200
_FARTHEST = 10.0
"""A target beyond ten times the steps done so far is too far to tell."""
_WARM_UP = 0.05


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """`floor + scale * step ** -power`."""

    floor: float
    scale: float
    power: float

    def at(self, step: float) -> float:
        """The loss at a step."""
        return self.floor + self.scale * math.pow(step, -self.power)

    def step_of(self, loss: float) -> float:
        """The step at which it gets there; infinite if it never does."""
        if loss <= self.floor or self.power <= 0:
            return math.inf
        exponent = math.log(self.scale / (loss - self.floor)) / self.power
        return math.exp(exponent) if exponent < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class ForecastFigure:
    """A number with its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class LossForecast:
    """When the loss gets to the target; None for what cannot be told, and why not."""

    target_loss: float
    last_step: int
    last_loss: float
    """Mean of the newest points."""
    reached_step: int | None = None
    """The step at which it was there already."""
    step: ForecastFigure | None = None
    left_s: ForecastFigure | None = None
    """Seconds from the last step on, at the pace of the newest ones."""
    cost: ForecastFigure | None = None
    """Of what is left, in the currency of the rate that was given."""
    floor: float | None = None
    """Where the fitted course ends."""
    reason: str = ""
    """Why there is no forecast."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def forecast_loss(view: JobView, *, target_loss: float, cost_per_hour: float | None = None) -> LossForecast:
    """Fit the recorded course and say when it reaches the target. Raises InvalidArgument without enough of it."""
    with view.lock:
        points = [point for point in view.curve.points() if point.loss is not None and point.step > 0]
    if len(points) < _LEAST_FIT_POINTS:
        raise InvalidArgument(
            f"a forecast needs the loss of at least {_LEAST_FIT_POINTS} steps",
            hint="let the run go on, or record its loss: td.Engine does, and loops with a loss module are seen too",
            steps=len(points),
        )
    course = [(float(point.step), point.loss or 0.0) for point in points]
    newest = points[-max(5, len(points) // 20) :]
    last_loss = statistics.fmean(point.loss or 0.0 for point in newest)
    told: dict[str, Any] = {"target_loss": target_loss, "last_step": points[-1].step, "last_loss": last_loss}
    reached = _reached(course, target_loss)
    if reached is not None:
        return LossForecast(**told, reached_step=reached)
    # The first steps, where the rate warms up, follow another law.
    means = _block_medians(course[int(_WARM_UP * len(course)) :])
    law = fit_power_law(means)
    if law is None:
        return LossForecast(**told, reason="the loss does not fall")
    far = _FARTHEST * points[-1].step
    steps = sorted(one.step_of(target_loss) for one in _courses(means, law))
    likely = law.step_of(target_loss)
    # On courses whose end is known the middle 90 % held it in 61 of 80 runs only: resampling knows nothing of the law's
    # own error. So the interval is that of all courses.
    low, high = steps[0], steps[-1]
    if not likely <= far or not high <= far:
        why = f"below the floor of {law.floor:.4g} that its course has" if likely == math.inf else "too far to tell"
        return LossForecast(**told, floor=law.floor, reason=f"the target is {why}")
    step = ForecastFigure(value=likely, low=max(low, points[-1].step), high=high)
    pace_s = (newest[-1].time - newest[0].time) / max(1, newest[-1].step - newest[0].step)
    left_s = _times(step, points[-1].step, pace_s)
    cost = None
    if cost_per_hour is not None:
        rate = cost_per_hour / 3600
        cost = ForecastFigure(value=left_s.value * rate, low=left_s.low * rate, high=left_s.high * rate)
    return LossForecast(**told, step=step, left_s=left_s, cost=cost, floor=law.floor)


def _block_medians(course: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Blocks of steps by their medians; means would lie above a course that bends."""
    size = max(1, len(course) // _NUM_FIT_BLOCKS)
    blocks = [course[at : at + size] for at in range(0, len(course) - size + 1, size)]
    return [(statistics.median(x for x, _ in block), statistics.median(y for _, y in block)) for block in blocks]


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """The law of least squares through some points; None if the loss does not fall."""
    lowest = min(loss for _, loss in points)
    reach = max(loss for _, loss in points) - lowest
    if reach <= 0:
        return None

    logs, losses = [math.log(step) for step, _ in points], [loss for _, loss in points]

    def best_of(depths: Sequence[float]) -> tuple[float, float, PowerLaw] | None:
        """By the logarithm of how far the floor is below the lowest loss, relative to how far the loss fell."""
        found = []
        for depth in depths:
            law = _with_floor(logs, losses, lowest - reach * 10**depth)
            if law is not None:
                found.append((_squares(law, logs, losses), depth, law))
        return min(found, key=lambda one: one[0], default=None)

    wide = (_DEPTHS[1] - _DEPTHS[0]) / (_NUM_FLOORS - 1)
    coarse = best_of([_DEPTHS[0] + wide * number for number in range(_NUM_FLOORS)])
    if coarse is None:
        return None
    fine = best_of([coarse[1] + wide * (number / _NUM_FLOORS * 2 - 1) for number in range(_NUM_FLOORS + 1)])
    return fine[2] if fine is not None else coarse[2]


def _with_floor(logs: Sequence[float], losses: Sequence[float], floor: float) -> PowerLaw | None:
    """By sums over whole lists, and none over pairs: a forecast takes five thousand of these."""
    above = [loss - floor for loss in losses]
    if min(above) <= 0:
        logs, above = [x for x, one in zip(logs, above, strict=True) if one > 0], [one for one in above if one > 0]
    # A loss close to the floor scatters more in the logarithm, and counts the less for it.
    weights, heights = list(map(mul, above, above)), list(map(math.log, above))
    total = sum(weights)
    mean_x, mean_y = sum(map(mul, weights, logs)) / total, sum(map(mul, weights, heights)) / total
    across = [x - mean_x for x in logs]
    weighted = list(map(mul, weights, across))
    spread = sum(map(mul, weighted, across))
    power = -sum(map(mul, weighted, [y - mean_y for y in heights])) / spread if spread > 0 else 0.0
    if power <= 0:
        return None
    return PowerLaw(floor=floor, scale=math.exp(mean_y + power * mean_x), power=power)


def _squares(law: PowerLaw, logs: Sequence[float], losses: Sequence[float]) -> float:
    floor, scale, power = law.floor, law.scale, -law.power
    rests = [floor + scale * math.exp(power * x) - loss for x, loss in zip(logs, losses, strict=True)]
    return sum(rest * rest for rest in rests)


def _courses(points: Sequence[tuple[float, float]], law: PowerLaw) -> list[PowerLaw]:
    """Laws fitted to the fitted course plus its own scatter, in another order."""
    source = random.Random(0)
    rests = [loss - law.at(step) for step, loss in points]
    found = []
    for _ in range(_NUM_COURSES):
        drawn = source.choices(rests, k=len(rests))
        again = fit_power_law([(step, law.at(step) + rest) for (step, _), rest in zip(points, drawn, strict=True)])
        if again is not None:
            found.append(again)
    return found or [law]


def _reached(course: Sequence[tuple[float, float]], target: float) -> int | None:
    """The first step from which on the median of ten points is at the target."""
    for at in range(len(course) - 9):
        if statistics.median(loss for _, loss in course[at : at + 10]) <= target:
            return int(course[at][0])
    return None


def _times(step: ForecastFigure, now: int, pace_s: float) -> ForecastFigure:
    return ForecastFigure(
        value=max(0.0, step.value - now) * pace_s,
        low=max(0.0, step.low - now) * pace_s,
        high=max(0.0, step.high - now) * pace_s,
    )


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
    slope, error = line_through(means)
    best = min(points, key=lambda point: point.loss if point.loss is not None else math.inf)
    trend = "flat" if abs(slope) <= _SURE * error else "improving" if slope < 0 else "rising"
    return Convergence(
        trend=trend,
        change_per_1000_steps=1000 * slope,
        error=1000 * error,
        best_loss=best.loss if best.loss is not None else math.nan,
        best_step=best.step,
    )


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
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
    # Where the loss falls steeply its neighbours differ much: that is not a spike.
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
