"""`torsh plan time`: how long a training takes and what it costs, with the best plan for each number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.cli.plan.fit_command import (
    Assignments,
    MeanSequence,
    ModelName,
    OptimizerName,
    PlanOption,
    Sequence,
    counted_optimizer,
)
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from torsh_distributed.planner.forecast.training_time import FailureRates, TrainingTime
    from torsh_distributed.planner.machine.machine_profile import MachineProfile

MachineName = Annotated[
    str | None,
    typer.Option("--machine", metavar="NAME", help="h100, a100-80gb, … or a .toml file; else this machine, measured."),
]
Mtbf = Annotated[str | None, typer.Option(help="Mean time between failures of one GPU with its node: 2000d.")]
Recovery = Annotated[str, typer.Option(help="From a failure to the next step; with --mtbf.")]
Save = Annotated[str, typer.Option(help="What one checkpoint holds training up for; with --mtbf.")]
_MOST_SEARCHED = 16_384

Batch = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Samples of a step, over all ranks; else the plan's, or from the memory left."),
]


def time(
    model: ModelName,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N", help="To train on: 300B, 1.5T.")],
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="N,…",
            help="Numbers of ranks to compare; with --deadline left out: 1, 2, 4, … until it is made.",
        ),
    ] = None,
    machine: MachineName = None,
    batch: Batch = None,
    plan: PlanOption = None,
    sequence: Sequence = None,
    mean_sequence: MeanSequence = None,
    optimizer: OptimizerName = None,
    deadline: Annotated[str | None, typer.Option(help="When it must be done: 30d, 12h.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of one GPU for an hour, in your currency.")] = None,
    mtbf: Mtbf = None,
    recovery: Recovery = "5min",
    save: Save = "10s",
    assignments: Assignments = None,
) -> None:
    """Predict how long a number of tokens takes and what it costs, with the best plan for each number of GPUs.

    All of it is an estimate, from a predicted step and your numbers. With --deadline, exit with status 1 if none of the
    numbers of GPUs makes it.
    """
    base = Plan.compose(plan, environ=os.environ, command_line=assignments or ())
    if batch is not None:
        base = base.replace(training={"batch_size": batch})
    from rich.console import Console

    from torsh_distributed.planner.forecast.training_time import count_of, seconds_of
    from torsh_distributed.planner.model.model_source import find_model

    wanted, limit_s = count_of(tokens), None if deadline is None else seconds_of(deadline)
    failures = failure_rates(mtbf, recovery, save)
    found = find_model(model)
    question = _TimeQuestion(
        found.model, found.example, base, machine, optimizer, (sequence, mean_sequence), failures, price
    )
    console = Console()

    def row_of(count: int) -> Row:
        return count, *question.answer(count, wanted)

    rows = _until(limit_s, row_of) if gpus is None and limit_s is not None else list(map(row_of, _counts(gpus or "1")))
    _show(rows, console, limit_s)
    for count, told in question.learned.items():
        console.print(f"{count} GPUs: {told}", highlight=False, soft_wrap=True, markup=False)
    if question.notes:
        console.print(f"not measured: {', '.join(question.notes)}", highlight=False, soft_wrap=True, markup=False)
    if limit_s is not None:
        told, is_made = _in_time(rows, limit_s, deadline)
        console.print(told, highlight=False, soft_wrap=True)
        if not is_made:
            raise typer.Exit(1)


Row = tuple[int, "TrainingTime | None", str]
"""A number of GPUs, its time with the best plan, and the plan; or why there is none."""


def _in_time(rows: list[Row], limit_s: float, deadline: str | None) -> tuple[str, bool]:
    """How many GPUs make it, in words, and whether any number does."""
    made = {count: one.is_done_by(limit_s) for count, one, _ in rows if one is not None}
    expected = min((count for count, (is_in_time, _) in made.items() if is_in_time), default=None)
    if expected is None:
        return f"none of them makes it in {deadline}", False
    surely = min((count for count, (_, is_sure) in made.items() if is_sure), default=None)
    if surely == expected:
        return f"{expected} GPUs make it in {deadline}", True
    slow = f"with steps as slow as nine of ten runs stay below, {surely or 'none of them'} would"
    return f"{expected} GPUs make it in {deadline} as predicted; {slow}", True


def _until(limit_s: float, answer: Callable[[int], Row]) -> list[Row]:
    """The rows of 1, 2, 4, … ranks up to the first that makes it in time; without those that no plan fits."""
    rows: list[Row] = []
    count = 1
    while count <= _MOST_SEARCHED:
        rows = [one for one in rows if one[1] is not None] + [answer(count)]
        found = rows[-1][1]
        if found is not None and all(found.is_done_by(limit_s)):
            break
        count *= 2
    return rows


def _counts(text: str) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in found):
        raise ConfigurationError(f"--gpus {text} is not a list of numbers of ranks", hint="such as 64 or 64,128,256")
    return sorted({int(part) for part in found})


@dataclass
class _TimeQuestion:
    """The training that is asked about, for any number of GPUs."""

    model: object
    example: object
    base: Plan
    machine: str | None
    optimizer: str | None
    lengths: tuple[int | None, int | None]
    """Tokens of the longest sample, and of a mean one."""
    failures: FailureRates | None
    price: float | None

    def __post_init__(self) -> None:
        self.notes: tuple[str, ...] = ()
        self.learned: dict[int, str] = {}
        """By number of GPUs: what past runs say of the prediction."""

    def answer(self, count: int, tokens: float) -> tuple[TrainingTime | None, str]:
        """The time with the best plan, and the plan; or None and why there is none."""
        from torsh_distributed.planner.forecast.training_time import TrainingTime
        from torsh_distributed.planner.search.auto_plan import names_batch, nearest, ranked_plans

        ranking = ranked_plans(
            self.model,  # type: ignore[arg-type]  # a module: the command line imports torch late
            world_size=count,
            machine=machine_or_this(self.machine, count),
            base=self.base,
            optimizer=counted_optimizer(self.optimizer)[0].name,
            sequence=self.lengths[0],
            mean_sequence=self.lengths[1],
            example=self.example,
            batch=None if names_batch(self.base) else "auto",
        )
        if not ranking.plans:
            return None, nearest(ranking)
        best = ranking.plans[0]
        self.notes = tuple(dict.fromkeys((*self.notes, *best.time.not_measured)))
        if best.time.learned():
            self.learned[count] = best.time.learned()
        return (
            TrainingTime(
                num_devices=count,
                step_s=best.time.total_s,
                tokens_per_step=float(best.plan.training.batch_size * ranking.tokens_per_sample),
                tokens=tokens,
                goodput=1.0 if self.failures is None else self.failures.goodput(count),
                price_per_hour=self.price,
                interval=best.time.interval,
            ),
            best.plan.mesh.equation,
        )


def failure_rates(mtbf: str | None, recovery: str, save: str) -> FailureRates | None:
    """What the user says of failures; None without a time between them."""
    from torsh_distributed.planner.forecast.training_time import FailureRates, seconds_of

    if mtbf is None:
        return None
    return FailureRates(device_mtbf_s=seconds_of(mtbf), recovery_s=seconds_of(recovery), save_s=seconds_of(save))


def machine_or_this(name: str | None, count: int) -> MachineProfile:
    """The machine of a description, or this one with so many ranks."""
    from torsh_distributed.planner.machine.machine_profile import machine_named
    from torsh_distributed.planner.machine.this_machine import this_machine

    return this_machine(count) if name is None else machine_named(name)


def _show(rows: list[Row], console: Console, limit_s: float | None) -> None:
    from rich.table import Table

    from torsh_distributed.planner.machine.step_text import step_text

    table = Table("GPUs", "mesh", "step", "tokens/s", "scaling", "goodput", "hours", "GPU hours", "cost")
    first = next((one for _, one, _ in rows if one is not None), None)
    for count, one, text in rows:
        if one is None or first is None:
            table.add_row(str(count), text, *[""] * 7)
            continue
        scaling = one.tokens_per_s / first.tokens_per_s / (count / first.num_devices)
        is_late = limit_s is not None and not one.is_done_by(limit_s)[0]
        table.add_row(
            str(count),
            text,
            step_text(one.step_s),
            f"{one.tokens_per_s:,.0f}",
            f"{scaling:.0%}",
            f"{one.goodput:.1%}",
            _between(one.total_s / 3600, ",.1f", one) + (" (late)" if is_late else ""),
            f"{one.device_hours:,.0f}",
            "" if one.cost is None else _between(one.cost, ",.0f", one),
        )
    console.print(table, highlight=False)
    told = "estimates; scaling is against the first row"
    if any(one is not None and one.interval is not None for _, one, _ in rows):
        told += "; in brackets what 90 % of runs would take, by past runs of this machine"
    console.print(told, highlight=False, soft_wrap=True)


def _between(value: float, form: str, time: TrainingTime) -> str:
    """A number that grows with the time of a step, with its interval if there is one."""
    if time.interval is None:
        return f"{value:{form}}"
    low, high = time.interval
    return f"{value:{form}} ({value * low:{form}} to {value * high:{form}})"
