"""`torsh render`: write scripts and files for a cluster, a container or a cloud, for you to read and run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.cli.cluster.submit_command import (
    Cpus,
    Env,
    Gpus,
    Memory,
    Name,
    Nodes,
    PlanFile,
    Restarts,
    Settings,
    TimeLimit,
    WorkingDir,
    given_variables,
)
from torsh_distributed.cli.run.option_values import elastic_spec, entry_kind, planned_elastic, read_plan
from torsh_distributed.cli.run.options import (
    CONTEXT_SETTINGS,
    Elastic,
    LossPolicy,
    MaxWorkers,
    MinWorkers,
    Module,
    NoPython,
    ScriptArgs,
)
from torsh_distributed.launch.spec import Entry

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_RESOURCES = "Resources"
What = Annotated[str, typer.Argument(help="slurm, pbs, mpi, docker, compose, k8s, aws, azure or gcp.")]
Script = Annotated[str, typer.Argument(help="Script to run; with -m a module, with --no-python a command.")]
Nproc = Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks on each node.", rich_help_panel=_RESOURCES)]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for the files. Default: print them.", file_okay=False)
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]


@app.command(context_settings=CONTEXT_SETTINGS)
def render(
    what: What,
    script: Script,
    script_args: ScriptArgs = None,
    name: Name = None,
    nodes: Nodes = 1,
    nproc_per_node: Nproc = 1,
    gpus_per_worker: Gpus = 0,
    cpus_per_worker: Cpus = 1,
    memory_per_worker: Memory = None,
    time_limit: TimeLimit = None,
    plan: PlanFile = None,
    working_dir: WorkingDir = None,
    env: Env = None,
    max_restarts: Restarts = 0,
    module: Module = False,
    no_python: NoPython = False,
    elastic: Elastic = False,
    min_workers: MinWorkers = None,
    max_workers: MaxWorkers = None,
    on_loss: LossPolicy = None,
    settings: Settings = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write what a cluster, a container or a cloud needs to run a script, and run nothing.

    Options come before WHAT. Several files are printed one after another, each under its name.
    """
    from torsh_distributed.clusters.engine_options import parse_settings
    from torsh_distributed.clusters.render.rendered_files import render as render_files
    from torsh_distributed.clusters.render.rendered_files import write_files
    from torsh_distributed.clusters.submission import Submission, parse_duration
    from torsh_distributed.clusters.submitting import new_job_name

    chosen = read_plan(plan, num_ranks=nodes * nproc_per_node)
    files = render_files(
        what,
        Submission(
            entry=Entry(kind=entry_kind(module, no_python), target=script, args=tuple(script_args or ())),
            name=name or new_job_name(script),
            nodes=nodes,
            workers_per_node=nproc_per_node,
            gpus_per_worker=gpus_per_worker,
            cpus_per_worker=cpus_per_worker,
            memory_per_worker=memory_per_worker,
            plan=None if plan is None else plan.resolve(),
            working_dir=(working_dir or Path.cwd()).resolve(),
            env=given_variables(env or ()),
            time_limit_s=None if time_limit is None else parse_duration(time_limit),
            max_restarts=max_restarts,
            elastic=elastic_spec(
                planned_elastic(chosen),
                wanted=elastic,
                min_workers=min_workers,
                max_workers=max_workers,
                on_loss=on_loss,
            ),
            options=parse_settings(settings or ()),
        ),
    )
    if output is not None:
        for path in write_files(files, output, replaces=force):
            typer.echo(path)
        return
    for number, one in enumerate(files):
        if len(files) > 1:
            typer.echo(f"{'' if number == 0 else chr(10)}==> {one.name} <==")
        typer.echo(one.text.rstrip("\n"))
