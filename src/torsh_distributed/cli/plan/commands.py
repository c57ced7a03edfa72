"""`torsh plan`: show, check and document plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.cli.plan.auto_command import auto
from torsh_distributed.cli.plan.fit_command import fit
from torsh_distributed.cli.plan.simulate_command import simulate
from torsh_distributed.cli.plan.time_command import time
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from torsh_distributed.parallel.mesh.layout import MeshLayout
    from torsh_distributed.plan.describing import ExplainedKey

# What only some of these commands need is imported by them: checking a plan takes a quarter of a second.
app = typer.Typer(name="plan", help="Show, check and document plans.", add_completion=False, no_args_is_help=True)

app.command("auto")(auto)
app.command("fit")(fit)
app.command("time")(time)
app.command("simulate")(simulate)

PlanFile = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="A .toml, .json, .yaml or .yml plan; else $TORSH_PLAN.")
]
WorldSize = Annotated[int | None, typer.Option("--world", min=1, metavar="N", help="Number of ranks to check against.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key, such as mesh.dp=2. Repeatable.")
]

OutputFile = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here.")]


@app.command("show")
def show(
    file: PlanFile = None,
    world: WorldSize = None,
    assignments: Assignments = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Also the keys at their defaults.")] = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="With --world: mesh and schedule as a picture.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODULE:FUNCTION", help="A function that builds the model; it gets no memory."),
    ] = None,
) -> None:
    """Print the keys of a plan: value, source, whether this version honours it.

    With --world, draw the mesh and, for a pipeline, its schedule with the bubble. With --model, print the parts of the
    model and how the plan splits them; no rank is started.
    """
    if png is not None and world is None:
        raise ConfigurationError("--png draws a plan for a number of ranks", hint="add --world N")
    plan = Plan.compose(file, environ=os.environ, command_line=assignments or ())
    from rich.console import Console

    rows = [row for row in plan.explain() if everything or row.source != "default"]
    console = Console()
    if rows:
        console.print(_table(rows))
    hidden = len(plan.explain().rows) - len(rows)
    if hidden:
        console.print(f"{hidden} keys are at their defaults (--all shows them).")
    if world is not None:
        _show_on(plan, world, console, png)
    if model is not None:
        from torsh_distributed.cli.plan.model_table import describe_model
        from torsh_distributed.planner.model.model_source import find_model

        resolved = plan if world is None else plan.replace(mesh=plan.mesh.resolve(world))
        for part in describe_model(find_model(model).model, resolved):
            console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


@app.command("validate")
def validate(file: PlanFile = None, world: WorldSize = None, assignments: Assignments = None) -> None:
    """Report everything that is wrong with a plan; exit with status 1 if anything is."""
    chosen = file or os.environ.get("TORSH_PLAN")
    if not chosen:
        raise ConfigurationError("there is no plan to check", hint="name a file, or set TORSH_PLAN")
    plan = Plan.compose(chosen, environ=os.environ, command_line=assignments or ())
    plan.validate(world)
    typer.echo(f"{chosen} is valid")
    for notice in plan.notices():
        typer.echo(f"note: {notice}")
    if world is not None:
        typer.echo(_fit(plan, world))


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of a plan, for editors and other tools."""
    typer.echo(json.dumps(Plan.model_json_schema(), indent=2))


@app.command("reference", hidden=True)
def reference(output: OutputFile = None) -> None:
    """Print the reference page of all keys, or write it to a file."""
    from torsh_distributed.plan.pages import render_reference

    _put(render_reference(), output)


@app.command("compatibility", hidden=True)
def compatibility(output: OutputFile = None) -> None:
    """Print the page of what goes together in a plan, or write it to a file."""
    from torsh_distributed.plan.pages import render_compatibility

    _put(render_compatibility(), output)


def _put(page: str, output: Path | None) -> None:
    if output is None:
        typer.echo(page, nl=False)
    else:
        from torsh_distributed.plan.reading.files import write_atomically

        write_atomically(output, page)


def _table(rows: list[ExplainedKey]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from torsh_distributed.plan.describing import show as as_text

    table = Table("Key", "Value", "Source", "Status")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(row.key, escape(as_text(row.value)), escape(row.source), row.status)
    return table


def _show_on(plan: Plan, world: int, console: Console, png: Path | None) -> None:
    """The plan on `world` ranks: its mesh, its pipeline's schedule, the samples of a step."""
    from torsh_distributed.cli.plan.mesh_drawing import describe_axes, draw_mesh, draw_plan
    from torsh_distributed.parallel.mesh.layout import MeshLayout

    layout = MeshLayout(plan.mesh.resolve(world))
    timeline = None
    if world > 1:
        console.print(draw_mesh(layout), highlight=False)
        for line in describe_axes(plan, layout):
            console.print(line, highlight=False, soft_wrap=True)
    if layout.degree("pp") > 1:
        # Here, not above: the import takes a second.
        from torsh_distributed.parallel.pipeline import compute_timeline, schedule_text

        timeline = compute_timeline(plan.pipeline, layout.degree("pp"))
        console.print(_schedule(plan, layout), highlight=False, soft_wrap=True)
        console.print(schedule_text(timeline, width=min(100, console.width - 8)), soft_wrap=True)
    console.print(_fit(plan, world), highlight=False, soft_wrap=True)
    if png is not None:
        drawn = draw_plan(layout, timeline, png, title=plan.pipeline.schedule)
        console.print(f"drawn in {drawn}", highlight=False, soft_wrap=True, markup=False)


def _schedule(plan: Plan, layout: MeshLayout) -> str:
    config, num_pipelines = plan.pipeline, layout.world_size // layout.degree("pp")
    stages = "1 stage" if config.stages_per_rank == 1 else f"{config.stages_per_rank} stages"
    whose = "the pipeline" if num_pipelines == 1 else f"each of {num_pipelines} pipelines"
    return (
        f"\nschedule of {whose}: {config.schedule}, {stages} on each rank along pp, {config.num_microbatches}"
        " microbatches; computed for stages of equal cost"
    )


def _fit(plan: Plan, world_size: int) -> str:
    mesh, training = plan.mesh.resolve(world_size), plan.training
    least, rest = divmod(training.batch_size, mesh.data_degree)
    share = f"{least} or {least + 1}" if rest else f"{least}"
    passes = "1 pass" if training.gradient_accumulation == 1 else f"{training.gradient_accumulation} passes"
    return (
        f"{mesh.equation} ranks; a step takes {training.batch_size} samples:"
        f" {share} on each of {mesh.data_degree} replicas, in {passes}"
    )
