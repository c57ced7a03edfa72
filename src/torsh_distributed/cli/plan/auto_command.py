"""`torsh plan auto`: the best plans for a model on some GPUs, why not the others, and a plan file that runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.cli.plan.fit_command import (
    Assignments,
    MeanSequence,
    Memory,
    ModelName,
    OptimizerName,
    PlanOption,
    Reserve,
    Sequence,
    counted_optimizer,
    memory_bytes,
)
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from torsh_distributed.planner.machine.machine_profile import MachineProfile
    from torsh_distributed.planner.search.ranking import RankedPlan, Ranking

_SHOWN = 10
_MOST_DRAWN = 64
"""Ranks of a mesh that is drawn; `torsh plan show` draws larger ones."""
_ALIKE, _NAMED = 0.1, 3
"""GPUs that are named have the memory that was asked for, within this share of it; so many are."""


def auto(
    model: ModelName,
    gpus: Annotated[int, typer.Option("--gpus", min=1, metavar="N", help="Number of ranks, each with a device.")] = 1,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine", metavar="NAME", help="h100, a100-80gb, … or a .toml file; else this machine, measured."
        ),
    ] = None,
    memory: Memory = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="N|auto",
            help="Samples of a step, over all ranks; auto, or where neither this nor the plan names any: from the"
            " memory left, for at least the plan's batch or 32·√ranks.",
        ),
    ] = None,
    plan: PlanOption = None,
    sequence: Sequence = None,
    mean_sequence: MeanSequence = None,
    optimizer: OptimizerName = None,
    reserve: Reserve = 0.05,
    assignments: Assignments = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan here.")] = None,
    *,
    simple: Annotated[bool, typer.Option("--simple", help="Replicas and shards only.")] = False,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="Say of each other layout why it was not taken.")
    ] = False,
) -> None:
    """Choose a plan: every legal layout, by predicted step time, and a plan file that runs as it is.

    Batch, formats and all other keys come from --plan and --set. Nothing is started; predictions are estimates, and
    inputs that were not measured are named.
    """
    base = Plan.compose(plan, environ=os.environ, command_line=assignments or ())
    if batch is not None and batch != "auto":
        base = base.replace(training={"batch_size": _whole_number(batch)})
    from rich.console import Console

    from torsh_distributed.planner.machine.machine_profile import machine_named
    from torsh_distributed.planner.machine.this_machine import this_machine
    from torsh_distributed.planner.model.model_source import find_model
    from torsh_distributed.planner.search.auto_plan import names_batch, nearest, no_plan, ranked_plans

    chosen = this_machine(gpus) if machine is None else machine_named(machine)
    found = find_model(model)
    counted, known = counted_optimizer(optimizer)
    is_batch_free = batch == "auto" or not names_batch(base)
    ranking = ranked_plans(
        found.model,
        world_size=gpus,
        machine=chosen,
        base=base,
        optimizer=counted.name,
        memory_bytes=None if memory is None else memory_bytes(memory),
        reserve=reserve,
        sequence=sequence,
        mean_sequence=mean_sequence,
        example=found.example,
        is_simple=simple,
        batch="auto" if is_batch_free else None,
    )
    console = Console()
    samples = "from the memory left" if is_batch_free else f"{base.training.batch_size:,} samples a step"
    console.print(f"optimizer: {known}; batch: {samples}", highlight=False, soft_wrap=True)
    if ranking.plans:
        console.print(_table(ranking.plans[:_SHOWN], is_batch_free=is_batch_free), highlight=False)
    for line in _notes(ranking, chosen, rejected=rejected):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if memory is not None and machine is None and chosen.device_type == "cpu":
        console.print(_gpus_to_name(memory_bytes(memory)), highlight=False, soft_wrap=True, markup=False)
    if not ranking.plans:
        console.print(f"{no_plan(ranking, chosen)}; {nearest(ranking)}", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(1)
    if 1 < gpus <= _MOST_DRAWN:
        _draw(ranking.plans[0].plan, gpus, console)
    if output is not None:
        ranking.plans[0].plan.save(output, with_defaults=False)
        told = f"the first one is in {output}: torsh run --nproc-per-node {gpus} --plan {output} train.py"
        console.print(f"{told}, whose script passes td.Plan.from_env() to parallelize", highlight=False, soft_wrap=True)


def _draw(plan: Plan, num_ranks: int, console: Console) -> None:
    """The first plan's mesh: which rank is where, and what each axis means."""
    from torsh_distributed.cli.plan.mesh_drawing import describe_axes, draw_mesh
    from torsh_distributed.parallel.mesh.layout import MeshLayout

    layout = MeshLayout(plan.mesh.resolve(num_ranks))
    console.print(draw_mesh(layout), highlight=False)
    for line in describe_axes(plan, layout):
        console.print(line, highlight=False, soft_wrap=True)


def _whole_number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"--batch {text} is not a number of samples", hint="such as 1024, or auto")
    return int(text)


def _table(plans: list[RankedPlan], *, is_batch_free: bool) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from torsh_distributed.planner.machine.step_text import samples_text, step_text

    # In a narrow terminal meshes take more lines; numbers and names stay whole.
    shown = Table(box=SIMPLE, padding=0, show_edge=False, title="estimates", title_justify="left")
    shown.add_column("", no_wrap=True)
    shown.add_column("mesh", min_width=7)
    for text in ("shards", "recompute"):
        shown.add_column(text, no_wrap=True)
    for text in ("a pass", "GB", "step", "samples/s"):
        shown.add_column(text, justify="right", no_wrap=True)
    shown.add_column("longest", no_wrap=True)
    for number, one in enumerate(plans, 1):
        plan = one.plan
        largest = max(one.time.terms, key=lambda term: one.time.terms[term])
        shown.add_row(
            str(number),
            _degrees(plan),
            plan.fsdp.strategy if plan.mesh.shard > 1 else "",
            plan.activation.strategy,
            f"{one.memory.num_samples}" + (f" of {plan.training.batch_size:,}" if is_batch_free else ""),
            f"{one.memory.peak_bytes / 1e9:.2f}",
            step_text(one.time.total_s),
            samples_text(1 / one.sample_s),
            largest,
        )
    return shown


def _degrees(plan: Plan) -> str:
    """The axes of more than one rank; degrees of one only take room."""
    used = (f"{axis} {degree}" for axis, degree in plan.mesh.degrees.items() if degree > 1)
    return " × ".join(used) or "one rank"


def _gpus_to_name(size: float) -> str:
    """How to get the times of GPUs, for someone who said their memory where there is none."""
    from torsh_distributed.planner.machine.machine_profile import described_machines, read_machine

    gpus = {name: read_machine(path) for name, path in described_machines().items()}
    alike = [name for name, gpu in gpus.items() if abs(gpu.memory_bytes / size - 1) < _ALIKE]
    named = sorted(alike or gpus, key=len)[:_NAMED]
    return (
        f"this machine has no GPU, so times and order are those of its CPU; for GPUs: --machine {', '.join(named)}, …"
    )


def _notes(ranking: Ranking, machine: MachineProfile, *, rejected: bool) -> list[str]:
    lines = [f"{ranking.num_tried} plans tried, {len(ranking.plans)} layouts fit, on {machine.name}"]
    if ranking.plans and ranking.plans[0].time.learned():
        lines.append(ranking.plans[0].time.learned())
    if ranking.plans and ranking.plans[0].time.not_measured:
        lines.append(f"not measured: {', '.join(ranking.plans[0].time.not_measured)}")
    if rejected:
        lines += [f"  {one.mesh}: {one.reason}" for one in ranking.rejections]
    elif ranking.rejections:
        lines.append(f"{len(ranking.rejections)} layouts were not taken; --rejected says why")
    return lines
