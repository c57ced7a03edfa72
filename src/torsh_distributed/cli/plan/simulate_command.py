"""`torsh plan simulate`: what slow ranks and failures do to a training, and a picture of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.cli.plan.fit_command import (
    ASSUMED_OPTIMIZER,
    Assignments,
    ModelName,
    PlanOption,
    Sequence,
)
from torsh_distributed.cli.plan.time_command import (
    MachineName,
    Mtbf,
    Recovery,
    Save,
    failure_rates,
    machine_or_this,
)
from torsh_distributed.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from torsh_distributed.parallel.pipeline import Timeline
    from torsh_distributed.planner.forecast.simulated_steps import SimulatedSteps
    from torsh_distributed.planner.forecast.training_time import FailureRates
    from torsh_distributed.planner.machine.machine_profile import MachineProfile
    from torsh_distributed.planner.machine.step_time import StepPredictor
    from torsh_distributed.planner.model.model_profile import ModelProfile


def simulate(
    model: ModelName,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Number of ranks; the plan must be for so many.")] = 1,
    machine: MachineName = None,
    plan: PlanOption = None,
    sequence: Sequence = None,
    spread: Annotated[float, typer.Option(min=0, max=2, help="Spread of the time of a phase, as a share: 0.03.")] = 0.0,
    rank_spread: Annotated[float, typer.Option(min=0, max=2, help="Spread between ranks, for the whole job.")] = 0.0,
    slow: Annotated[float, typer.Option(min=0, max=1, help="Share of the ranks that are stragglers.")] = 0.0,
    slow_by: Annotated[float, typer.Option(min=1, help="How many times slower stragglers compute.")] = 2.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps to draw.")] = 10,
    seed: Annotated[int, typer.Option(help="The same seed draws the same steps.")] = 0,
    mtbf: Mtbf = None,
    recovery: Recovery = "5min",
    save: Save = "10s",
    duration: Annotated[str, typer.Option(help="Length of the jobs whose failures are drawn; with --mtbf.")] = "30d",
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="The step as a picture.")] = None,
    assignments: Assignments = None,
) -> None:
    """Draw steps of many ranks that are not equally fast: what waiting for the slowest of each group costs.

    Durations come from the predicted step; spreads are yours, such as those that `torsh bench machine` shows. One step
    is shown on a time axis. With --mtbf, failures of jobs are drawn as well. No rank is started.
    """
    failures = failure_rates(mtbf, recovery, save)
    chosen = Plan.compose(plan, environ=os.environ, command_line=assignments or ())
    chosen.validate(ranks)
    from rich.console import Console

    from torsh_distributed.planner.forecast.simulated_steps import Spreads, simulate_steps
    from torsh_distributed.planner.forecast.step_picture import picture_of_step

    resolved = chosen.resolve(ranks)
    used = machine_or_this(machine, ranks)
    predictor = _predictor(model, resolved, used, sequence)
    spreads = Spreads(ranks=rank_spread, phases=spread, slow_ranks=slow, slow_by=slow_by)
    phases = predictor.phases(resolved)
    found = simulate_steps(phases, resolved, spreads=spreads, num_steps=steps, seed=seed)
    lines = list(_told(found, resolved, used.name))
    if failures is not None:
        lines += _drawn_failures(failures, ranks, duration, found.mean_s, seed)
    lines += _doubts(predictor.profile, resolved, used, ranks)
    notes = predictor.step_time(resolved).not_measured
    lines += [f"not measured: {', '.join(notes)}"] if notes else []
    console = Console()
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    _draw(picture_of_step(phases, resolved, spreads=spreads, seed=seed), console, png)


def _told(found: SimulatedSteps, plan: Plan, machine: str) -> Iterator[str]:
    from torsh_distributed.planner.machine.step_text import step_text

    yield (
        f"{found.num_ranks:,} ranks on {machine}, {plan.mesh.equation}: {step_text(found.mean_s)} a step"
        f" ({step_text(min(found.steps_s))} to {step_text(max(found.steps_s))}),"
        f" {found.slowdown:.2f} times that of ranks that are all alike, {step_text(found.alike_s)}"
    )
    for name, share in sorted(found.waited.items(), key=lambda one: -one[1]):
        yield f"  {share:6.1%} of the ranks' time waiting: {name}"


def _doubts(profile: ModelProfile, plan: Plan, machine: MachineProfile, ranks: int) -> Iterator[str]:
    """Why no such job would run, though its steps can be drawn."""
    from torsh_distributed.planner.memory.memory_table import GB
    from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
    from torsh_distributed.planner.memory.rank_memory import estimate_peak

    batch, with_samples = plan.training.batch_size, plan.mesh.data_degree
    if batch < with_samples:
        without = f"{with_samples - batch:,} of {with_samples:,} ranks"
        yield f"a batch of {batch} leaves {without} without a sample: drawn with one"
    peak = estimate_peak(profile, plan, optimizer_named(ASSUMED_OPTIMIZER), device_type=machine.device_type).peak_bytes
    if peak > machine.memory_bytes:
        told = f"{peak / GB:.0f} GB on a rank, and {machine.name} has {machine.memory_bytes / GB:.0f}"
        yield f"the plan does not fit: {told}; torsh plan auto --gpus {ranks} finds one"


def _drawn_failures(rates: FailureRates, num_ranks: int, duration: str, step_s: float, seed: int) -> Iterator[str]:
    """What failures leave of a job's time, in words."""
    from torsh_distributed.planner.forecast.simulated_failures import simulate_failures
    from torsh_distributed.planner.forecast.training_time import HOUR_S, seconds_of

    duration_s = seconds_of(duration)
    found = simulate_failures(rates, num_ranks, duration_s=duration_s, seed=seed)
    (fewest, most), (worst, best) = found.range_of(found.num_failures), found.range_of(found.goodput)
    goodput, lost = found.goodput.mean(), ", ".join(f"{share:.1%} {name}" for name, share in found.lost_to.items())
    yield (
        f"in {duration}: {found.num_failures.mean():,.1f} failures ({fewest:,.0f} to {most:,.0f} in nine of ten of"
        f" {len(found.goodput):,} drawn jobs), one every {rates.job_mtbf_s(num_ranks) / HOUR_S:,.1f} h, with a"
        f" checkpoint every {rates.period_s(num_ranks) / 60:,.1f} min"
    )
    yield (
        f"  {goodput:.1%} of the time is progress ({worst:.1%} to {best:.1%}):"
        f" {goodput * duration_s / step_s:,.0f} steps; lost: {lost}"
    )


def _draw(timeline: Timeline, console: Console, png: Path | None) -> None:
    """One step, in text and, if asked for, as a picture."""
    from torsh_distributed.parallel.pipeline import draw_schedule, schedule_text
    from torsh_distributed.planner.machine.step_text import step_text

    indent = max(map(len, timeline.row_names))
    console.print(f"the first step drawn, {step_text(timeline.span)}:", highlight=False)
    console.print(schedule_text(timeline, width=max(20, min(100, console.width - indent))), soft_wrap=True)
    if png is not None:
        drawn = draw_schedule(timeline, png, title="a step")
        console.print(f"drawn in {drawn}", highlight=False, soft_wrap=True, markup=False)


def _predictor(name: str, plan: Plan, machine: MachineProfile, sequence: int | None) -> StepPredictor:
    from torsh_distributed.planner.machine.step_time import StepPredictor
    from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
    from torsh_distributed.planner.model.model_source import find_model
    from torsh_distributed.planner.model.profiling import profile_model

    found = find_model(name)
    profile = profile_model(found.model, plan, sequence=sequence, example=found.example)
    return StepPredictor(profile, machine, optimizer_named(ASSUMED_OPTIMIZER))
