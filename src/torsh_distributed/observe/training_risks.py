"""What may go wrong with a training that runs well: overfitting, exploding gradients, a rate that does nothing. Pure.

Everything is judged against the run's own past, with its scatter: no number here depends on the model or the data, and
those that are a matter of taste are in `RiskThresholds`.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.analytics import block_means, line_through
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.training_curve import CurvePoint, EvaluationPoint

_LEAST_POINTS = 40
_LEAST_EVALUATIONS = 3
_NUM_BLOCKS = 20
_NEWEST_SHARE = 0.05
_LEAST_NEWEST = 5


@dataclass(frozen=True, kw_only=True)
class RiskThresholds:
    """From where on something is a risk."""

    overfitting_rise: float = 0.02
    """How far the validation loss may be above its best, relative to it, while the training loss falls."""
    gradient_factor: float = 10.0
    """How many times its usual value the norm of the gradient may be."""
    sure: float = 2.0
    """How many standard errors a change must have to count as one."""
    spent_rate: float = 0.1
    """Below this part of its largest value a learning rate has been taken down on purpose."""

    def __post_init__(self) -> None:
        for name, least in (("overfitting_rise", 0), ("gradient_factor", 1), ("sure", 0), ("spent_rate", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name} must be a number from {least} on", got=getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Overfitting:
    """Whether the model learns the training data by heart."""

    verdict: Literal["none", "overfitting", "both rise"]
    best_loss: float
    """The lowest validation loss."""
    best_step: int
    last_loss: float
    rise: float
    """Of the last validation loss above the best, relative to it."""
    training_change: float
    """Of the training loss since the best step, relative to what it was there."""
    gap: float
    """The last validation loss minus the training loss then."""


@dataclass(frozen=True, kw_only=True)
class GradientRisk:
    """Where the norm of the gradient goes."""

    verdict: Literal["calm", "growing", "exploding"]
    usual_norm: float
    """Median before the newest steps."""
    newest_norm: float
    """Median of the newest steps."""
    variation: float
    """Standard deviation over mean."""
    doubling_steps: float | None
    """In how many steps the norm doubles, over the second half of the run; None if it does not grow."""
    num_spikes: int
    """Steps above the threshold's multiple of the usual norm."""
    num_nonfinite: int
    """Steps whose norm was no finite number."""


@dataclass(frozen=True, kw_only=True)
class LearningRateEffect:
    """What the learning rate brings, over the newest quarter of the run."""

    verdict: Literal["effective", "no effect", "spent", "too high"]
    """No effect: the loss stands although the rate is high. Spent: it stands, and the rate has been taken down. Too
    high: the loss rises."""
    rate: float
    """Mean of the quarter."""
    peak_rate: float
    change_per_1000_steps: float
    """Of the loss."""
    error: float
    """Standard error of that change."""
    fall_per_rate: float
    """Fall of the loss in the quarter over the sum of the rates of its steps."""
    earlier_fall_per_rate: float
    """The same of the quarter before."""


@dataclass(frozen=True, kw_only=True)
class TrainingRisks:
    """All of them; None for what the records do not tell."""

    overfitting: Overfitting | None
    gradients: GradientRisk | None
    learning_rate: LearningRateEffect | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def training_risks(view: JobView, thresholds: RiskThresholds | None = None) -> TrainingRisks:
    """Judge the points that the view has kept; takes some milliseconds."""
    limits = thresholds or RiskThresholds()
    with view.lock:
        points, evaluations = view.curve.points(), view.evaluations.points()
        num_nonfinite = max(view.series("torsh_nonfinite_values", "torsh_gradient_norm").values(), default=0)
    losses = [(point.step, point.loss) for point in points if point.loss is not None]
    return TrainingRisks(
        overfitting=_overfitting(losses, evaluations, limits),
        gradients=_gradients(points, int(num_nonfinite), limits),
        learning_rate=_learning_rate(points, limits),
    )


def _overfitting(
    losses: Sequence[tuple[int, float]], evaluations: Sequence[EvaluationPoint], limits: RiskThresholds
) -> Overfitting | None:
    if len(losses) < _LEAST_POINTS or len(evaluations) < _LEAST_EVALUATIONS:
        return None
    best = min(evaluations, key=lambda one: one.loss)
    last = evaluations[-1]
    then, now = _loss_around(losses, best.step), _loss_around(losses, last.step)
    rise = (last.loss - best.loss) / max(abs(best.loss), 1e-12)
    change = (now - then) / max(abs(then), 1e-12)
    # One evaluation above the best is chance; from the second on it is a course.
    since = [one.loss for one in evaluations if one.step > best.step]
    has_risen = len(since) > 1 and min(since[-2:]) > best.loss + limits.overfitting_rise * abs(best.loss)
    return Overfitting(
        verdict="none" if not has_risen else "overfitting" if now < then else "both rise",
        best_loss=best.loss,
        best_step=best.step,
        last_loss=last.loss,
        rise=rise,
        training_change=change,
        gap=last.loss - now,
    )


def _loss_around(losses: Sequence[tuple[int, float]], step: int) -> float:
    """The mean training loss of the points just before a step."""
    width = max(_LEAST_NEWEST, int(_NEWEST_SHARE * len(losses)))
    end = max(bisect.bisect_right(losses, step, key=lambda one: one[0]), min(width, len(losses)))
    return statistics.fmean(loss for _, loss in losses[max(0, end - width) : end])


def _gradients(points: Sequence[CurvePoint], num_nonfinite: int, limits: RiskThresholds) -> GradientRisk | None:
    norms = [(float(point.step), point.grad_norm) for point in points if point.grad_norm and point.grad_norm > 0]
    if len(norms) < _LEAST_POINTS:
        return None
    values = [norm for _, norm in norms]
    num_newest = max(_LEAST_NEWEST, int(_NEWEST_SHARE * len(values)))
    usual, newest = statistics.median(values[:-num_newest]), statistics.median(values[-num_newest:])
    half = [(step, math.log(norm)) for step, norm in norms[len(norms) // 2 :]]
    slope, error = line_through(block_means(half, _NUM_BLOCKS))
    is_growing = slope > limits.sure * error
    # At this pace, after as many steps again as the growth was seen over.
    ahead = slope * (half[-1][0] - half[0][0])
    is_exploding = newest > limits.gradient_factor * usual
    will_explode = is_growing and newest * math.exp(min(ahead, 700.0)) > limits.gradient_factor * usual
    return GradientRisk(
        verdict="exploding" if is_exploding else "growing" if will_explode else "calm",
        usual_norm=usual,
        newest_norm=newest,
        variation=statistics.pstdev(values) / statistics.fmean(values),
        doubling_steps=math.log(2) / slope if is_growing else None,
        num_spikes=sum(norm > limits.gradient_factor * usual for norm in values),
        num_nonfinite=num_nonfinite,
    )


def _learning_rate(points: Sequence[CurvePoint], limits: RiskThresholds) -> LearningRateEffect | None:
    known = [
        (float(point.step), point.loss, point.learning_rate)
        for point in points
        if point.loss is not None and point.learning_rate is not None
    ]
    if len(known) < _LEAST_POINTS:
        return None
    quarter = len(known) // 4
    newest, earlier = known[-quarter:], known[-2 * quarter : -quarter]
    slope, error = line_through(block_means([(step, loss) for step, loss, _ in newest], _NUM_BLOCKS))
    rate, peak = statistics.fmean(one[2] for one in newest), max(one[2] for one in known)
    verdict: Literal["effective", "no effect", "spent", "too high"]
    if slope < -limits.sure * error:
        verdict = "effective"
    elif slope > limits.sure * error:
        verdict = "too high"
    else:
        verdict = "spent" if rate < limits.spent_rate * peak else "no effect"
    return LearningRateEffect(
        verdict=verdict,
        rate=rate,
        peak_rate=peak,
        change_per_1000_steps=1000 * slope,
        error=1000 * error,
        fall_per_rate=_fall_per_rate(newest),
        earlier_fall_per_rate=_fall_per_rate(earlier),
    )


def _fall_per_rate(points: Sequence[tuple[float, float, float]]) -> float:
    """How far the line through the losses falls, over the sum of the rates of all steps between the points."""
    slope, _ = line_through(block_means([(step, loss) for step, loss, _ in points], _NUM_BLOCKS))
    mean_rate = statistics.fmean(rate for _, _, rate in points)
    # Fall and sum grow with the number of steps alike, so it cancels.
    return -slope / mean_rate if mean_rate > 0 else 0.0
