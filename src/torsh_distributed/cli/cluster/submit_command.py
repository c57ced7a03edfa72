"""`torsh submit`: hand a script to an engine that runs it elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.cli.run.option_values import elastic_spec, entry_kind, planned_elastic, read_plan
from torsh_distributed.cli.run.options import (
    CONTEXT_SETTINGS,
    Elastic,
    LossPolicy,
    MaxWorkers,
    MinWorkers,
    Module,
    NoPython,
    Script,
    ScriptArgs,
)
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import Entry, parse_nproc

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_RESOURCES, _JOB = "Resources", "The job"


def _list_engines(wanted: bool) -> None:
    if wanted:
        from torsh_distributed.clusters.registry import ENGINES

        for name, entry in sorted(ENGINES.items()):
            typer.echo(f"{name:8} {entry.summary}")
        raise typer.Exit


Engines = Annotated[
    bool, typer.Option("--engines", help="List the engines, and stop.", is_eager=True, callback=_list_engines)
]
To = Annotated[str, typer.Option("--to", help="The engine: ssh, slurm, mpi, …; `torsh submit --engines` lists them.")]
Name = Annotated[
    str | None,
    typer.Option(help="The job's name. Default: the script's, with a random end.", rich_help_panel=_JOB),
]
Nodes = Annotated[int, typer.Option("--nodes", "--nnodes", min=1, help="Nodes.", rich_help_panel=_RESOURCES)]
Nproc = Annotated[str, typer.Option("--nproc-per-node", help="Ranks on each node.", rich_help_panel=_RESOURCES)]
Gpus = Annotated[int, typer.Option(min=0, help="GPUs of each rank.", rich_help_panel=_RESOURCES)]
Cpus = Annotated[int, typer.Option(min=1, help="Cores of each rank.", rich_help_panel=_RESOURCES)]
Memory = Annotated[
    str | None, typer.Option("--memory-per-worker", help="Memory of each rank, as 8G.", rich_help_panel=_RESOURCES)
]
TimeLimit = Annotated[
    str | None,
    typer.Option(help="How long it may run: seconds, 30m, 12h or 12:00:00.", rich_help_panel=_RESOURCES),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(help="Plan for the ranks (TORSH_PLAN), checked first for their number.", rich_help_panel=_JOB),
]
WorkingDir = Annotated[
    Path | None,
    typer.Option(help="Where the ranks start. Default: the current directory.", rich_help_panel=_JOB),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", help="NAME=VALUE for the ranks, or NAME to take its value from here.", rich_help_panel=_JOB),
]
Restarts = Annotated[
    int,
    typer.Option("--max-restarts", min=0, help="How often the job starts again after a failure.", rich_help_panel=_JOB),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="key=value: a setting of the engine alone, such as partition=gpu.", rich_help_panel=_JOB
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show its output until it is over.")]
QueueTimeout = Annotated[
    str | None,
    typer.Option(help="With --follow: cancel it if it has not started by then, as 30m."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be handed over, and stop.")]


@app.command(context_settings=CONTEXT_SETTINGS)
def submit(
    script: Script,
    script_args: ScriptArgs = None,
    to: To = "",
    engines: Engines = False,
    name: Name = None,
    nodes: Nodes = 1,
    nproc_per_node: Nproc = "1",
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
    follow: Follow = False,
    queue_timeout: QueueTimeout = None,
    dry_run: DryRun = False,
) -> None:
    """Hand a script to a cluster's engine, which runs it as `torsh run` would.

    Options come before the script. `torsh jobs`, `torsh logs` and `torsh cancel` find the job again.
    """
    from torsh_distributed.cli.cluster.following import follow_to_the_end
    from torsh_distributed.clusters.engine_options import parse_settings
    from torsh_distributed.clusters.registry import open_engine
    from torsh_distributed.clusters.submission import Submission, parse_duration
    from torsh_distributed.clusters.submitting import check_submission, hand_over, new_job_name

    if not to:
        raise InvalidArgument("--to is missing: no engine is named", hint="`torsh submit --engines` lists them")
    if queue_timeout is not None and not follow:
        raise InvalidArgument("--queue-timeout without --follow has no effect", hint="add --follow")
    num_workers = parse_nproc(nproc_per_node)
    chosen = read_plan(plan, num_ranks=nodes * num_workers)
    submission = Submission(
        entry=Entry(kind=entry_kind(module, no_python), target=script, args=tuple(script_args or ())),
        name=name or new_job_name(script),
        nodes=nodes,
        workers_per_node=num_workers,
        gpus_per_worker=gpus_per_worker,
        cpus_per_worker=cpus_per_worker,
        memory_per_worker=memory_per_worker,
        plan=None if plan is None else plan.resolve(),
        working_dir=Path(os.path.realpath(working_dir or Path.cwd())),  # which takes a loop of links as it is
        env=given_variables(env or ()),
        time_limit_s=None if time_limit is None else parse_duration(time_limit),
        max_restarts=max_restarts,
        elastic=elastic_spec(
            planned_elastic(chosen), wanted=elastic, min_workers=min_workers, max_workers=max_workers, on_loss=on_loss
        ),
        options=parse_settings(settings or ()),
    )
    if dry_run:
        check_submission(submission)
        typer.echo(open_engine(to, submission.options).render(submission).rstrip("\n"))
        return
    job = hand_over(submission, to=to)
    typer.echo(f"torsh submit: {job.name} is job {job.record.job_id} of {to}", err=True)
    if follow:
        limit_s = None if queue_timeout is None else parse_duration(queue_timeout)
        raise typer.Exit(follow_to_the_end(job, queue_limit_s=limit_s))
    typer.echo(job.name)


def given_variables(words: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Variables from `NAME=VALUE`, and from `NAME` with this process's value, which then is on no command line."""
    found = {}
    for word in words:
        name, given, value = word.partition("=")
        if not name or (not given and name not in os.environ):
            raise InvalidArgument(
                f"--env {name}: no variable of that name is set here" if name else "--env needs a name",
                hint="--env NAME=VALUE, or --env NAME for a variable that is set",
            )
        found[name] = value if given else os.environ[name]
    return found
