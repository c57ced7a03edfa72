"""`torsh run`: torchrun's flags, read into a JobSpec."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand
from typing_extensions import override

from torsh_distributed.cli.cluster.ssh_run import Carry, Hosts, Ssh, SshConfig, SshOption, SshPython, ssh_hosts
from torsh_distributed.cli.observe.options import (
    DEFAULT_PAGE_PORT,
    Alerts,
    Dashboard,
    DashboardHost,
    DashboardPort,
    Export,
    HtmlReport,
    PrometheusPort,
    observe_settings,
)
from torsh_distributed.cli.run.discovered_job import are_here, discovery_spec, first_hosts
from torsh_distributed.cli.run.option_values import (
    check_backend,
    default_heartbeat_timeout_s,
    elastic_spec,
    entry_kind,
    master_endpoint,
    own_tls,
    parse_ranks,
    planned_elastic,
    read_plan,
    read_token,
)
from torsh_distributed.cli.run.options import (
    CONTEXT_SETTINGS,
    DryRun,
    Elastic,
    ExitTimeout,
    Health,
    HeartbeatTimeout,
    HostCooldown,
    HostDiscoveryScript,
    JoinTimeout,
    Json,
    LocalRanksFilter,
    LogDir,
    LossPolicy,
    MasterAddr,
    MasterPort,
    MaxRestarts,
    MaxWorkers,
    MinWorkers,
    Module,
    Mpi,
    Nnodes,
    NodeRank,
    NoPython,
    NoToken,
    NprocPerNode,
    PlanFile,
    PortRange,
    Raw,
    RdzvBackend,
    RdzvEndpoint,
    RdzvId,
    Role,
    RunAs,
    Script,
    ScriptArgs,
    ShutdownTimeout,
    SignalTimeout,
    SlotsPerHost,
    SpotNotice,
    Standalone,
    Tls,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    TorchStore,
    TraceDir,
    TraceLimit,
    Verbose,
    WaitTimeout,
)
from torsh_distributed.cli.run.trace_recording import own_arguments, recorded, trace_variables
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import (
    LOOPBACK,
    Entry,
    JobSpec,
    parse_health,
    parse_nnodes,
    parse_nproc,
    parse_port_range,
)

ELASTIC_RESTARTS = 3
"""How often an elastic job restarts all workers where it cannot go on in place, unless the user says otherwise."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

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


@app.command(cls=RunCommand, context_settings=CONTEXT_SETTINGS)
def run(
    context: typer.Context,
    script: Script,
    script_args: ScriptArgs = None,
    nproc_per_node: NprocPerNode = "1",
    max_restarts: MaxRestarts = None,
    module: Module = False,
    no_python: NoPython = False,
    role: Role = "default",
    mpi: Mpi = False,
    run_as: RunAs = None,
    plan: PlanFile = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = 0,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    standalone: Standalone = False,
    rdzv_backend: RdzvBackend = "static",
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = None,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    torch_store: TorchStore = False,
    tls: Tls = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    health: Health = None,
    spot_notice: SpotNotice = None,
    port_range: PortRange = None,
    ssh: Ssh = False,
    hosts: Hosts = None,
    ssh_config: SshConfig = None,
    ssh_option: SshOption = None,
    ssh_python: SshPython = None,
    carry: Carry = None,
    log_dir: LogDir = None,
    local_ranks_filter: LocalRanksFilter = "",
    verbose: Verbose = False,
    raw: Raw = False,
    json: Json = False,
    dry_run: DryRun = False,
    trace: TraceDir = None,
    trace_limit_mb: TraceLimit = 200.0,
    shutdown_timeout: ShutdownTimeout = 3.0,
    exit_timeout: ExitTimeout = 600.0,
    signal_timeout: SignalTimeout = 25.0,
    join_timeout: JoinTimeout = 300.0,
    heartbeat_timeout: HeartbeatTimeout = None,
    elastic: Elastic = False,
    min_workers: MinWorkers = None,
    max_workers: MaxWorkers = None,
    on_loss: LossPolicy = None,
    wait_timeout: WaitTimeout = None,
    host_discovery_script: HostDiscoveryScript = None,
    slots_per_host: SlotsPerHost = None,
    host_cooldown: HostCooldown = None,
    dashboard: Dashboard = False,
    dashboard_port: DashboardPort = DEFAULT_PAGE_PORT,
    dashboard_host: DashboardHost = LOOPBACK,
    prometheus_port: PrometheusPort = None,
    html_report: HtmlReport = None,
    export: Export = None,
    alerts: Alerts = None,
) -> None:
    """Start a script on every worker, supervise it, and say why it ended.

    Takes torchrun's flags and gives workers torchrun's environment. Options come before the script. With --as, those of
    another library's launcher too.
    """
    assert run_as is None, "taken out of the line before it is read"
    address, port = master_endpoint(master_addr, master_port, rdzv_endpoint, is_standalone=standalone)
    check_backend(rdzv_backend)
    num_nodes, num_workers = parse_nnodes(nnodes), parse_nproc(nproc_per_node)
    discovery = discovery_spec(host_discovery_script, slots_per_host=slots_per_host, cooldown=host_cooldown)
    enter = partial(
        ssh_hosts,
        config=ssh_config,
        options=ssh_option or (),
        python=ssh_python,
        carry=carry or (),
        nproc_per_node=num_workers,
    )
    # Which hosts a script names is asked once all else is known to be right.
    remote = enter(ssh, hosts) if discovery is None else None
    if remote is not None:
        if mpi or num_nodes > 1 or node_rank:
            raise InvalidArgument(
                "--ssh takes nodes and their order from --hosts", hint="leave out --nnodes, --node-rank and --mpi"
            )
        num_nodes, num_workers = len(remote.hosts), remote.num_workers
    if standalone and num_nodes > 1:
        raise InvalidArgument("--standalone is for one node", hint="leave it out with --nnodes", nnodes=num_nodes)
    chosen = read_plan(plan, num_ranks=num_nodes * num_workers)
    changes = elastic_spec(
        planned_elastic(chosen),
        wanted=elastic,
        min_workers=min_workers,
        max_workers=max_workers,
        on_loss=on_loss,
        wait_timeout_s=wait_timeout,
        discovery=discovery,
    )
    counts: tuple[int, ...] = ()
    if discovery is not None and changes is not None:
        if mpi or ssh or hosts or num_nodes > 1 or node_rank:
            raise InvalidArgument(
                "--host-discovery-script says the nodes of a job",
                hint="leave out --ssh, --hosts, --nnodes, --node-rank and --mpi",
            )
        found = first_hosts(discovery, changes, num_workers)
        if are_here(found):
            num_workers = sum(found.values())
        else:
            remote = enter(True, ",".join(f"{host}:{count}" for host, count in found.items()), may_differ=True)
            assert remote is not None, "it is wanted"
            num_nodes, num_workers, counts = len(remote.hosts), remote.num_workers, remote.counts
    if mpi and changes is not None:
        raise InvalidArgument(
            "--mpi and --elastic exclude each other: an MPI job ends when a rank is lost", hint="leave out one of them"
        )
    if mpi and tls:
        raise InvalidArgument("--mpi and --tls exclude each other: MPI has no encryption", hint="leave out one of them")
    spec = JobSpec(
        entry=Entry(kind=entry_kind(module, no_python), target=script, args=tuple(script_args or ())),
        nproc_per_node=num_workers,
        workers_by_node=counts,
        nnodes=num_nodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        max_restarts=max_restarts if max_restarts is not None else 0 if changes is None else ELASTIC_RESTARTS,
        run_id=rdzv_id or ("none" if num_nodes > 1 and remote is None else uuid.uuid4().hex[:8]),
        role=role,
        log_dir=log_dir,
        shown_ranks=parse_ranks(local_ranks_filter),
        is_verbose=verbose,
        is_raw=raw,
        is_json=json,
        token=read_token(token_file),
        wants_tls=tls,
        tls=own_tls(tls_cert, tls_key, tls_ca, wanted=tls),
        allows_no_token=no_token,
        serves_torch_store=torch_store,
        env={
            **context.meta.get(_WORKER_VARIABLES, {}),
            **({} if plan is None else {"TORSH_PLAN": str(plan.resolve())}),
            **trace_variables(trace, trace_limit_mb, num_ranks=num_nodes * num_workers),
        },
        observe=observe_settings(
            chosen,
            dashboard=dashboard,
            dashboard_port=dashboard_port,
            dashboard_host=dashboard_host,
            prometheus_port=prometheus_port,
            html_report=html_report,
            export=export,
            alerts=alerts,
        ),
        health=None if health is None else parse_health(health),
        spot_notice=spot_notice,
        shutdown_timeout_s=shutdown_timeout,
        exit_timeout_s=exit_timeout,
        signal_timeout_s=signal_timeout,
        join_timeout_s=join_timeout,
        heartbeat_timeout_s=heartbeat_timeout
        or default_heartbeat_timeout_s(is_elastic=changes is not None, is_over_ssh=remote is not None),
        elastic=changes,
        port_range=None if port_range is None else parse_port_range(port_range),
    )
    if remote is not None:
        raise typer.Exit(remote.describe(spec) if dry_run else remote.launch(spec))
    with _mpi_job(spec) if mpi else nullcontext(spec) as job:
        if dry_run:
            raise typer.Exit(_describe(job))
        with recorded(trace, trace_limit_mb, arguments=own_arguments()) if trace is not None else nullcontext():
            exit_code = _launch(job)
        raise typer.Exit(exit_code)


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

    return launch_job(job)


def _mpi_job(spec: JobSpec) -> AbstractContextManager[JobSpec]:
    from torsh_distributed.launch.mpi.mpi_job import mpi_job

    return mpi_job(spec)
