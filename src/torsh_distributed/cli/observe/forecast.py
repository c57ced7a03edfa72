"""`torsh forecast`: how a recorded run trains, and when its loss will be where it should be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torsh_distributed.observe.analytics import ForecastFigure, LossForecast, TrainingCourse
    from torsh_distributed.observe.training_risks import TrainingRisks

app = typer.Typer(add_completion=False)


@app.command()
def forecast(
    events_dir: Annotated[Path, typer.Argument(help="Event files of a run, which may still write them.")],
    target_loss: Annotated[float | None, typer.Option(help="Say when the loss will be this low.")] = None,
    cost_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="What an hour of the whole job costs, in any currency.")
    ] = None,
    overfitting_rise: Annotated[
        float,
        typer.Option(min=0.0, help="Overfitting: how far the validation loss is above its best, as a part of it."),
    ] = 0.02,
    gradient_factor: Annotated[
        float, typer.Option(min=1.0, help="Exploding gradients: how many times the usual norm they have.")
    ] = 10.0,
    sure: Annotated[
        float, typer.Option(min=0.0, help="How many standard errors a change must have to count as one.")
    ] = 2.0,
    spent_rate: Annotated[
        float, typer.Option(min=0.0, help="Below this part of its peak, a learning rate was taken down on purpose.")
    ] = 0.1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how a run converges, how calmly and how efficiently, what is a risk, and when its loss reaches a target."""
    import json as json_format

    from torsh_distributed.observe.analytics import forecast_loss, training_course
    from torsh_distributed.observe.job.run_files import EventFiles
    from torsh_distributed.observe.training_risks import RiskThresholds, training_risks

    limits = RiskThresholds(
        overfitting_rise=overfitting_rise, gradient_factor=gradient_factor, sure=sure, spent_rate=spent_rate
    )
    view = EventFiles(events_dir).read_all()
    course, risks = training_course(view), training_risks(view, limits)
    found = None
    if target_loss is not None:
        found = forecast_loss(view, target_loss=target_loss, cost_per_hour=cost_per_hour)
    if json:
        told = None if found is None else found.to_dict()
        report = {"course": course.to_dict(), "risks": risks.to_dict(), "forecast": told}
        typer.echo(json_format.dumps(report, indent=2))
        return
    for line in [*_course_lines(course), *_risk_lines(risks), *(_forecast_lines(found) if found is not None else [])]:
        typer.echo(line)


def _course_lines(course: TrainingCourse) -> list[str]:
    lines = []
    if course.convergence is not None:
        one = course.convergence
        lines.append(
            f"convergence: {one.trend}, {one.change_per_1000_steps:+.4g} ± {one.error:.2g} in 1,000 steps; "
            f"best {one.best_loss:.4g} at step {one.best_step}"
        )
    if course.stability is not None:
        calm = course.stability
        scatter = "" if calm.scatter is None else f"scatter {calm.scatter:.1%}, "
        lines.append(
            f"stability: {scatter}{calm.num_spikes} spikes, {calm.num_nonfinite} losses that are not numbers, "
            f"{calm.num_skipped} skipped steps"
        )
    if course.efficiency is not None:
        used = course.efficiency
        parts = [f"{used.goodput:.0%} of the time in steps"]
        parts += [f"{used.busy_share:.0%} of a step busy"] if used.busy_share is not None else []
        if used.samples_per_s is not None:
            error = f" ± {used.samples_per_s_error:.2g}" if used.samples_per_s_error is not None else ""
            parts.append(f"{used.samples_per_s:.4g}{error} samples/s")
        parts += [f"MFU {used.mfu:.1%}"] if used.mfu is not None else []
        lines.append(f"efficiency: {', '.join(parts)}")
    return lines or ["the run has too few steps to say anything"]


def _risk_lines(risks: TrainingRisks) -> list[str]:
    lines = []
    if risks.overfitting is not None:
        one = risks.overfitting
        lines.append(
            f"overfitting: {one.verdict}, validation loss {one.last_loss:.4g}, {one.rise:.1%} above its best of step "
            f"{one.best_step}; training loss {one.last_loss - one.gap:.4g}, {one.training_change:+.1%} since then"
        )
    if risks.gradients is not None:
        norm = risks.gradients
        doubling = "" if norm.doubling_steps is None else f", doubles in {norm.doubling_steps:,.0f} steps"
        lines.append(
            f"gradients: {norm.verdict}, norm {norm.newest_norm:.4g}, usually {norm.usual_norm:.4g}, varies by "
            f"{norm.variation:.0%}{doubling}; {norm.num_spikes} spikes, {norm.num_nonfinite} that are not numbers"
        )
    if risks.learning_rate is not None:
        rate = risks.learning_rate
        lines.append(
            f"learning rate: {rate.verdict}, {rate.rate:.3g} of at most {rate.peak_rate:.3g}; loss "
            f"{rate.change_per_1000_steps:+.4g} ± {rate.error:.2g} in 1,000 steps; it falls by "
            f"{rate.fall_per_rate:.3g} for each unit of rate, before by {rate.earlier_fall_per_rate:.3g}"
        )
    return lines


def _forecast_lines(found: LossForecast) -> list[str]:
    start = f"loss {found.target_loss:g}"
    if found.reached_step is not None:
        return [f"{start}: reached at step {found.reached_step}"]
    if found.step is None or found.left_s is None:
        return [f"{start}: no forecast, {found.reason} (now {found.last_loss:.4g} at step {found.last_step})"]
    when = f"{_figure(found.left_s, 60)} minutes from step {found.last_step} on"
    lines = [f"{start}: at step {_figure(found.step, 1)} (90 %), {when}"]
    if found.cost is not None:
        lines.append(f"cost until then: {_figure(found.cost, 1)}")
    return lines


def _figure(figure: ForecastFigure, unit: float) -> str:
    return f"{figure.value / unit:,.4g} [{figure.low / unit:,.4g} to {figure.high / unit:,.4g}]"
