"""`torsh demo`: a ready training job on local workers, with progress, a summary and a loss curve."""

from __future__ import annotations

import uuid
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.cli.observe.options import (
    DEFAULT_PAGE_PORT,
    Dashboard,
    DashboardPort,
    Green,
    ObserveOptions,
    PrometheusPort,
    green_config,
    observe_settings,
)
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.spec import ElasticSpec, Entry, EntryKind, JobSpec
from torsh_distributed.train.demos.demo_plan import plan_for

DemoName = StrEnum("DemoName", {"GPT": "gpt", "MLP": "mlp", "MOE": "moe"})


app = typer.Typer(add_completion=False)


@app.command()
def demo(
    name: Annotated[
        DemoName,
        typer.Argument(help="What to train: a character GPT, the same with experts (moe), or an MLP on spirals."),
    ] = DemoName.GPT,
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", help="Local workers.")] = 2,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan file; its section `training` replaces the demo's. auto: the best for these workers."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer updates; wins over the plan.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the loss curve goes; runs/NAME by default.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Say at the end where the time of a step went, per axis of the mesh.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often all workers are restarted after a failure.")] = 0,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Go on when a worker is lost: try `kill -9` on one, rank 0 included.")
    ] = False,
    dashboard: Dashboard = False,
    dashboard_port: DashboardPort = DEFAULT_PAGE_PORT,
    prometheus_port: PrometheusPort = None,
    green: Green = False,
) -> None:
    """Train a demo on local workers: progress, a summary, a loss curve."""
    directory = out or Path("runs") / name.value
    if plan == Path("auto"):
        plan = _chosen_plan(name.value, steps, nproc_per_node, directory)
    chosen = plan_for(name.value, plan, steps)
    chosen.validate(nproc_per_node)
    args = ["--demo", name.value, "--out", str(directory)]
    if plan is not None:
        args += ["--plan", str(plan)]
    if steps is not None:
        args += ["--steps", str(steps)]
    if report:
        args.append("--report")
    spec = JobSpec(
        entry=Entry(kind=EntryKind.MODULE, target="torsh_distributed.cli.demo.worker", args=tuple(args)),
        nproc_per_node=nproc_per_node,
        max_restarts=max_restarts,
        run_id=uuid.uuid4().hex[:8],
        elastic=ElasticSpec(max_workers=max(64, nproc_per_node)) if elastic else None,
        observe=observe_settings(
            chosen,
            ObserveOptions(
                dashboard=dashboard,
                dashboard_port=dashboard_port,
                prometheus_port=prometheus_port,
                green=green,
                html_report=Path(chosen.observe.report or directory / "report.html"),
            ),
        ),
        green=green_config(chosen, wanted=green),
    )
    raise typer.Exit(launch_job(spec))


def _chosen_plan(name: str, steps: int | None, num_ranks: int, directory: Path) -> Path:
    """The file with the plan that the planner chooses for the demo on this machine."""
    from torsh_distributed.plan import Plan
    from torsh_distributed.train.demos import DEMOS

    base = plan_for(name, None, steps)
    demo = DEMOS[name](base)
    inputs, _ = next(iter(demo.loader))
    found = Plan.auto(demo.model, world_size=num_ranks, base=base, example=(inputs,))
    typer.echo(f"planned for this machine: {found.mesh.equation} ranks")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "plan.toml"
    found.save(path, with_defaults=False)
    return path
