"""`torsh run`: torchrun's flags, read into a JobSpec."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand
from typing_extensions import override

from torsh_distributed.cli.observe.options import ObserveOptions, energy_record, green_config, observe_settings
from torsh_distributed.cli.option_records import takes_records
from torsh_distributed.cli.run.job_size import JobSize, job_size
from torsh_distributed.cli.run.option_values import (
    check_backend,
    default_heartbeat_timeout_s,
    entry_kind,
    master_endpoint,
    own_tls,
    parse_ranks,
    read_token,
)
from torsh_distributed.cli.run.options import (
    CONTEXT_SETTINGS,
    ElasticOptions,
    NodeOptions,
    OutputOptions,
    SshOptions,
    StartMethod,
    TimeLimits,
    WorkerOptions,
)
from torsh_distributed.cli.run.trace_recording import own_arguments, recorded, trace_variables
from torsh_distributed.launch.spec import Entry, JobSpec, parse_health, parse_port_range

ELASTIC_RESTARTS = 3
"""How often an elastic job restarts all workers where it cannot go on in place, unless the user says otherwise."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_KEPT_PLAN = "TORSH_AUTO_PLAN"
_WORKER_VARIABLES = "torsh_distributed.run.worker_variables"
"""Where the translation of another launcher's line leaves variables for the workers."""


class RunCommand(TyperCommand):
    """Translates the line first if it is for another library's launcher (`--as`)."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Any: typer has its own click."""
        from torsh_distributed.migrate.command_lines import find_run_as, translate_line

        ours = {name: not getattr(option, "is_flag", False) for option in self.params for name in option.opts}
        found = find_run_as(args, ours)
        if found is not None:
            line = translate_line(*found, ours)
            for note in line.notes:
                typer.echo(f"torsh run --as {found[0]}: {note}", err=True)
            ctx.meta[_WORKER_VARIABLES] = line.env
            args = line.args
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


class RunOptions(NamedTuple):
    """The command line of `torsh run`."""

    workers: WorkerOptions
    nodes: NodeOptions
    ssh: SshOptions
    output: OutputOptions
    limits: TimeLimits
    changing: ElasticOptions
    observe: ObserveOptions


@app.command(cls=RunCommand, context_settings=CONTEXT_SETTINGS)
@takes_records
def run(context: typer.Context, options: RunOptions) -> None:
    """Start a script on every worker, supervise it, and say why it ended.

    Takes torchrun's flags and gives workers torchrun's environment. Options come before the script. With --as, those of
    another library's launcher too.
    """
    workers, nodes, output = options.workers, options.nodes, options.output
    assert workers.run_as is None, "taken out of the line before it is read"
    address, port = master_endpoint(
        nodes.master_addr, nodes.master_port, nodes.rdzv_endpoint, is_standalone=nodes.standalone
    )
    check_backend(nodes.rdzv_backend)
    size = job_size(workers, nodes, options.ssh, options.changing)
    spec = _spec(options, size, address=address, port=port, variables=context.meta.get(_WORKER_VARIABLES, {}))
    if size.remote is not None:
        raise typer.Exit(size.remote.describe(spec) if output.dry_run else size.remote.launch(spec))
    with _mpi_job(spec) if workers.mpi else nullcontext(spec) as job:
        if output.dry_run:
            raise typer.Exit(_describe(job))
        trace: AbstractContextManager[None] = nullcontext()
        if output.trace is not None:
            trace = recorded(output.trace, output.trace_limit_mb, arguments=own_arguments())
        with trace:
            exit_code = _launch(job)
        raise typer.Exit(exit_code)


def _spec(
    options: RunOptions, size: JobSize, *, address: str, port: int | None, variables: Mapping[str, str]
) -> JobSpec:
    """The job of these options; `variables` are for the workers, from another launcher's line."""
    workers, nodes, output, limits = options.workers, options.nodes, options.output, options.limits
    is_elastic, is_over_ssh = size.elastic is not None, size.remote is not None
    default_restarts = ELASTIC_RESTARTS if is_elastic else 0
    heartbeat_timeout_s = limits.heartbeat_timeout or default_heartbeat_timeout_s(
        is_elastic=is_elastic, is_over_ssh=is_over_ssh
    )
    run_id = nodes.rdzv_id or ("none" if size.num_nodes > 1 and not is_over_ssh else uuid.uuid4().hex[:8])
    return JobSpec(
        entry=Entry(
            kind=entry_kind(workers.module, workers.no_python),
            target=workers.script,
            args=tuple(workers.script_args or ()),
        ),
        nproc_per_node=size.num_workers,
        workers_by_node=size.counts,
        nnodes=size.num_nodes,
        node_rank=nodes.node_rank,
        master_addr=address,
        master_port=port,
        max_restarts=default_restarts if workers.max_restarts is None else workers.max_restarts,
        run_id=run_id,
        role=workers.role,
        log_dir=output.log_dir,
        shown_ranks=parse_ranks(output.local_ranks_filter),
        is_verbose=output.verbose,
        is_raw=output.raw,
        is_json=output.json,
        token=read_token(nodes.token_file),
        wants_tls=nodes.tls,
        tls=own_tls(nodes.tls_cert, nodes.tls_key, nodes.tls_ca, wanted=nodes.tls),
        allows_no_token=nodes.no_token,
        serves_torch_store=workers.torch_store,
        forks_workers=workers.start_method is not StartMethod.SPAWN,
        env={
            **variables,
            **(_first_gpu() if workers.share_gpu else {}),
            **_plan_variables(workers.plan, output, run_id),
            **trace_variables(output.trace, output.trace_limit_mb, num_ranks=size.num_nodes * size.num_workers),
        },
        observe=observe_settings(size.plan, options.observe),
        green=green_config(size.plan, wanted=options.observe.green),
        energy_record=energy_record(size.plan),
        health=None if nodes.health is None else parse_health(nodes.health),
        spot_notice=nodes.spot_notice,
        shutdown_timeout_s=limits.shutdown_timeout,
        exit_timeout_s=limits.exit_timeout,
        signal_timeout_s=limits.signal_timeout,
        join_timeout_s=limits.join_timeout,
        heartbeat_timeout_s=heartbeat_timeout_s,
        elastic=size.elastic,
        port_range=None if nodes.port_range is None else parse_port_range(nodes.port_range),
    )


def _plan_variables(plan: Path | None, output: OutputOptions, run_id: str) -> dict[str, str]:
    """The plan for the workers; one that they choose is kept in the run's directory, and one of before is removed."""
    if plan is None:
        return {}
    from torsh_distributed.plan.plan import AUTO

    if str(plan) != AUTO:
        return {"TORSH_PLAN": str(plan.resolve())}
    kept = (output.trace or output.log_dir or Path("runs") / run_id) / "plan.toml"
    if not output.dry_run:
        kept.unlink(missing_ok=True)
    return {"TORSH_PLAN": AUTO, _KEPT_PLAN: str(kept.resolve())}


def _first_gpu() -> dict[str, str]:
    """Workers that see one GPU share it: `init()` then takes a backend that can."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"}


def _describe(job: JobSpec) -> int:
    """Print what would be started."""
    from torsh_distributed.launch.entry import check_entry
    from torsh_distributed.launch.job import describe_job

    check_entry(job.entry)
    typer.echo("\n".join(describe_job(job)))
    return 0


def _launch(job: JobSpec) -> int:
    # Imported here: `torsh run --help` and a wrong option need no launcher.
    from torsh_distributed.launch.job import launch_job

    exit_code = launch_job(job)
    kept = job.env.get(_KEPT_PLAN)
    if exit_code == 0 and kept is not None and job.node_rank == 0 and not Path(kept).exists():
        typer.echo(
            f"torsh run: --plan auto chose nothing, because no rank called td.parallelize: if {job.entry.target} does"
            " not bring up a group by itself, each of its ranks trained alone",
            err=True,
        )
    return exit_code


def _mpi_job(spec: JobSpec) -> AbstractContextManager[JobSpec]:
    from torsh_distributed.launch.mpi.mpi_job import mpi_job

    return mpi_job(spec)
