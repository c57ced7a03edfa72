"""`torsh run`: torchrun's flags, read into a JobSpec."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperCommand
from typing_extensions import override

from torsh_distributed.cli.cluster.ssh_run import Carry, Hosts, Ssh, SshConfig, SshPython, ssh_hosts
from torsh_distributed.cli.error_message import print_error
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
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument, IoError
from torsh_distributed.launch.spec import (
    LOOPBACK,
    ElasticSpec,
    Entry,
    EntryKind,
    JobSpec,
    OnLoss,
    parse_endpoint,
    parse_health,
    parse_nnodes,
    parse_nproc,
    parse_port_range,
)

if TYPE_CHECKING:
    from torsh_distributed.comm.trust.job_tls import JobTls
    from torsh_distributed.plan import Plan

CONTEXT_SETTINGS = {
    # Options after the script belong to the script.
    "allow_interspersed_args": False,
    # torchrun spells its flags with dashes and with underscores.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
_NODES, _WORKERS, _OUTPUT, _LIMITS, _ELASTIC = "Nodes", "Workers", "Output", "Time limits", "Workers that come and go"


Script = Annotated[str, typer.Argument(help="Script to run; with -m a module, with --no-python a command.")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]

NprocPerNode = Annotated[
    str,
    typer.Option(
        help="Workers on each node: a number, cpu, gpu, or auto (GPUs, else usable cores).",
        envvar="PET_NPROC_PER_NODE",
        rich_help_panel=_WORKERS,
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        help="How often all workers are restarted after a failure. Default 0, with --elastic 3.",
        envvar="PET_MAX_RESTARTS",
        rich_help_panel=_WORKERS,
    ),
]
Module = Annotated[bool, typer.Option("--module", "-m", help="Run a module, as python -m.", rich_help_panel=_WORKERS)]
NoPython = Annotated[bool, typer.Option("--no-python", help="Run a command as it is.", rich_help_panel=_WORKERS)]
Role = Annotated[str, typer.Option(help="ROLE_NAME of the workers.", envvar="PET_ROLE", rich_help_panel=_WORKERS)]
Mpi = Annotated[
    bool, typer.Option("--mpi", help="Make the workers one MPI job (MPICH), for mpi4py.", rich_help_panel=_WORKERS)
]
RunAs = Annotated[
    str | None,
    typer.Option(
        "--as",
        help="Stand in for this library in the workers and take its launcher's options: horovod, fairscale.",
        rich_help_panel=_WORKERS,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(help="Plan for the workers (TORSH_PLAN), checked first for their number.", rich_help_panel=_WORKERS),
]

Nnodes = Annotated[str, typer.Option(help="Nodes of the job.", envvar="PET_NNODES", rich_help_panel=_NODES)]
NodeRank = Annotated[int, typer.Option(help="Index of this node.", envvar="PET_NODE_RANK", rich_help_panel=_NODES)]
MasterAddr = Annotated[
    str | None,
    typer.Option(
        help=f"Address of node 0; it listens there and nowhere else. Default {LOOPBACK}.",
        envvar="PET_MASTER_ADDR",
        rich_help_panel=_NODES,
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        help="One node: port of the store (default: a free one). Several: where launchers meet (default 29500).",
        envvar="PET_MASTER_PORT",
        rich_help_panel=_NODES,
    ),
]
Standalone = Annotated[
    bool, typer.Option("--standalone", help="One node, on loopback, on a free port.", rich_help_panel=_NODES)
]
RdzvBackend = Annotated[
    str,
    typer.Option(
        help="static or c10d; both are served by the launcher of node 0.",
        envvar="PET_RDZV_BACKEND",
        rich_help_panel=_NODES,
    ),
]
RdzvEndpoint = Annotated[
    str,
    typer.Option(
        help="HOST:PORT, another spelling of --master-addr and --master-port.",
        envvar="PET_RDZV_ENDPOINT",
        rich_help_panel=_NODES,
    ),
]
RdzvId = Annotated[
    str | None,
    typer.Option(help="Name of the run, the same on every node.", envvar="PET_RDZV_ID", rich_help_panel=_NODES),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the job's secret, the same on every node, created if missing; otherwise TORSH_JOB_TOKEN.",
        rich_help_panel=_NODES,
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token",
        help="Several nodes without a secret: whoever reaches the master port can join.",
        rich_help_panel=_NODES,
    ),
]
PortRange = Annotated[
    str | None,
    typer.Option(
        help="FIRST-LAST: the only ports that launchers, the store and the ranks' backends listen on.",
        rich_help_panel=_NODES,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Encrypt everything between nodes, on every node alike; what cannot be is refused.",
        envvar="TORSH_TLS",
        rich_help_panel=_NODES,
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option(help="Certificate of this node, in PEM. Default: one made now.", rich_help_panel=_NODES)
]
TlsKey = Annotated[Path | None, typer.Option(help="Its key.", rich_help_panel=_NODES)]
TlsCa = Annotated[
    Path | None, typer.Option(help="Authority that must have signed the others'.", rich_help_panel=_NODES)
]
TorchStore = Annotated[
    bool,
    typer.Option(
        "--torch-store",
        help="Serve torch's TCPStore, which asks for no secret, to programs that open it themselves.",
        rich_help_panel=_WORKERS,
    ),
]

Health = Annotated[
    str | None,
    typer.Option(
        help="Serve /healthz and /readyz for probes at HOST:PORT, or at PORT on loopback.", rich_help_panel=_NODES
    ),
]

SpotNotice = Annotated[
    str | None,
    typer.Option(
        help="Save and end when this cloud takes the machine back: aws, gcp or azure.", rich_help_panel=_NODES
    ),
]

LogDir = Annotated[
    Path | None,
    typer.Option(
        help="Keep stdout and stderr of every rank and attempt here.", envvar="PET_LOG_DIR", rich_help_panel=_OUTPUT
    ),
]
LocalRanksFilter = Annotated[
    str,
    typer.Option(
        help="Show only these local ranks, such as 0,1.", envvar="PET_LOCAL_RANKS_FILTER", rich_help_panel=_OUTPUT
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show every rank's traceback, not the cause alone.", rich_help_panel=_OUTPUT),
]
Json = Annotated[
    bool, typer.Option("--json", help="Report the end as one JSON object on stderr.", rich_help_panel=_OUTPUT)
]
TraceDir = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Record events of all ranks here and make trace.json of them at the end.",
        rich_help_panel=_OUTPUT,
    ),
]
TraceLimit = Annotated[
    float, typer.Option("--trace-limit-mb", min=0.1, help="Most megabytes of a trace.", rich_help_panel=_OUTPUT)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be started, and stop.", rich_help_panel=_OUTPUT)
]

ShutdownTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds from SIGTERM to SIGKILL after a failure.",
        envvar="PET_SHUTDOWN_TIMEOUT",
        rich_help_panel=_LIMITS,
    ),
]
SignalTimeout = Annotated[
    float, typer.Option(help="Seconds from your signal to SIGKILL: time to save.", rich_help_panel=_LIMITS)
]
JoinTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds for the launchers of all nodes to meet.", envvar="TORSH_INIT_TIMEOUT", rich_help_panel=_LIMITS
    ),
]
HeartbeatTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds of silence after which a node counts as lost: 10, with --elastic 1.", rich_help_panel=_LIMITS
    ),
]

Elastic = Annotated[
    bool,
    typer.Option("--elastic", help="Go on when a worker is lost; a plan can say so too.", rich_help_panel=_ELASTIC),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(help="Fewest workers to train with. Default 1, or the plan's.", rich_help_panel=_ELASTIC),
]
MaxWorkers = Annotated[
    int | None, typer.Option(help="Most workers to train with. Default 64, or the plan's.", rich_help_panel=_ELASTIC)
]
LossPolicy = Annotated[
    str | None,
    typer.Option(
        "--on-loss",
        help="replace the worker (default), shrink, wait for the replacement, or restart all.",
        rich_help_panel=_ELASTIC,
    ),
]

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
    ssh_python: SshPython = None,
    carry: Carry = None,
    log_dir: LogDir = None,
    local_ranks_filter: LocalRanksFilter = "",
    verbose: Verbose = False,
    json: Json = False,
    dry_run: DryRun = False,
    trace: TraceDir = None,
    trace_limit_mb: TraceLimit = 200.0,
    shutdown_timeout: ShutdownTimeout = 3.0,
    signal_timeout: SignalTimeout = 25.0,
    join_timeout: JoinTimeout = 300.0,
    heartbeat_timeout: HeartbeatTimeout = None,
    elastic: Elastic = False,
    min_workers: MinWorkers = None,
    max_workers: MaxWorkers = None,
    on_loss: LossPolicy = None,
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
    address, port = _master(master_addr, master_port, rdzv_endpoint, is_standalone=standalone)
    _check_backend(rdzv_backend)
    num_nodes, num_workers = parse_nnodes(nnodes), parse_nproc(nproc_per_node)
    remote = ssh_hosts(ssh, hosts, config=ssh_config, python=ssh_python, carry=carry or (), nproc_per_node=num_workers)
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
        planned_elastic(chosen), wanted=elastic, min_workers=min_workers, max_workers=max_workers, on_loss=on_loss
    )
    if mpi and changes is not None:
        raise InvalidArgument(
            "--mpi and --elastic exclude each other: an MPI job ends when a rank is lost", hint="leave out one of them"
        )
    if mpi and tls:
        raise InvalidArgument("--mpi and --tls exclude each other: MPI has no encryption", hint="leave out one of them")
    spec = JobSpec(
        entry=Entry(kind=entry_kind(module, no_python), target=script, args=tuple(script_args or ())),
        nproc_per_node=num_workers,
        nnodes=num_nodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        max_restarts=max_restarts if max_restarts is not None else 0 if changes is None else ELASTIC_RESTARTS,
        run_id=rdzv_id or ("none" if num_nodes > 1 and remote is None else uuid.uuid4().hex[:8]),
        role=role,
        log_dir=log_dir,
        shown_ranks=_parse_ranks(local_ranks_filter),
        is_verbose=verbose,
        is_json=json,
        token=_read_token(token_file),
        wants_tls=tls,
        tls=_own_tls(tls_cert, tls_key, tls_ca, wanted=tls),
        allows_no_token=no_token,
        serves_torch_store=torch_store,
        env={
            **context.meta.get(_WORKER_VARIABLES, {}),
            **({} if plan is None else {"TORSH_PLAN": str(plan.resolve())}),
            **_trace_variables(trace, trace_limit_mb, num_ranks=num_nodes * num_workers),
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
        signal_timeout_s=signal_timeout,
        join_timeout_s=join_timeout,
        # Over SSH one terminal shows all nodes, and a dead one is to be named there at once.
        heartbeat_timeout_s=heartbeat_timeout or (10.0 if changes is None and remote is None else 1.0),
        elastic=changes,
        port_range=None if port_range is None else parse_port_range(port_range),
    )
    if remote is not None:
        raise typer.Exit(remote.describe(spec) if dry_run else remote.launch(spec))
    with _mpi_job(spec) if mpi else nullcontext(spec) as job:
        if dry_run:
            raise typer.Exit(_describe(job))
        with _recorded(trace, trace_limit_mb, arguments=_own_arguments()) if trace is not None else nullcontext():
            exit_code = _launch(job)
        raise typer.Exit(exit_code)


def elastic_spec(
    planned: dict[str, Any],
    *,
    wanted: bool,
    min_workers: int | None = None,
    max_workers: int | None = None,
    on_loss: str | None = None,
) -> ElasticSpec | None:
    """How workers may come and go, from the options and from a plan's section; options win."""
    given = {"min_workers": min_workers, "max_workers": max_workers, "on_loss": on_loss}
    given = {name: value for name, value in given.items() if value is not None}
    if not (wanted or planned):
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InvalidArgument(f"{names} without --elastic has no effect", hint="add --elastic")
        return None
    if given.get("on_loss", "replace") not in get_args(OnLoss):
        raise InvalidArgument(f"--on-loss must be one of {', '.join(get_args(OnLoss))}", on_loss=on_loss)
    return ElasticSpec(**{**planned, **given})


def planned_elastic(plan: Plan | None) -> dict[str, Any]:
    """What a plan says for the launcher; empty if it does not ask for it."""
    if plan is None or not plan.elastic.enabled:
        return {}
    section = plan.elastic
    return {
        "min_workers": section.min_workers,
        "max_workers": section.max_workers,
        "on_loss": "restart" if section.mode == "restart" else section.on_loss,
        "hang_timeout_s": section.heartbeat_timeout_s,
        "wait_timeout_s": section.scaling_timeout_s,
    }


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


def _trace_variables(trace: Path | None, limit_mb: float, *, num_ranks: int) -> dict[str, str]:
    """What makes the workers record, each within its share of the limit; an event takes about as much as its slice."""
    if trace is None:
        return {}
    return {
        "TORSH_EVENTS_DIR": str((trace / "events").resolve()),
        "TORSH_EVENTS_MAX_MB": str(max(1.0, 2 * limit_mb / num_ranks)),
    }


@contextmanager
def _recorded(trace: Path, limit_mb: float, *, arguments: list[str]) -> Iterator[None]:
    """Around the job: how it was started, the launcher's own events, and at the end the timeline."""
    import json
    import sys

    from torsh_distributed.cli.trace.trace_commands import merged
    from torsh_distributed.events import JsonlSink

    with JsonlSink(trace / "events"):
        (trace / "run.json").write_text(json.dumps({"arguments": arguments, "directory": str(Path.cwd())}) + "\n")
        yield
    try:
        typer.echo(f"torsh run: {merged(trace, trace / 'trace.json', limit_mb=limit_mb)}", err=True)
        typer.echo(f"torsh run: `torsh why {trace}` says where the time went", err=True)
    except IoError as error:
        # The job's own end is what counts: a script without events has no timeline.
        print_error(error)
        sys.stderr.flush()


def _own_arguments() -> list[str]:
    """The command line of this `torsh run`, without what asks for a trace: `torsh tune` starts it again."""
    import sys

    given = sys.argv[2:] if sys.argv[1:2] == ["run"] else sys.argv[1:]
    for name in ("--trace", "--trace-limit-mb", "--trace_limit_mb"):
        # The first is ours: options of the script come after it.
        at = next((at for at, one in enumerate(given) if one == name or one.startswith(f"{name}=")), None)
        if at is not None:
            given = given[:at] + given[at + (1 if "=" in given[at] else 2) :]
    return given


def _mpi_job(spec: JobSpec) -> AbstractContextManager[JobSpec]:
    from torsh_distributed.launch.mpi.mpi_job import mpi_job

    return mpi_job(spec)


def entry_kind(module: bool, no_python: bool) -> EntryKind:
    """How the target is started, from the two options."""
    if module and no_python:
        raise InvalidArgument("-m and --no-python exclude each other", hint="a module is run by Python")
    return EntryKind.MODULE if module else EntryKind.COMMAND if no_python else EntryKind.SCRIPT


def _master(address: str | None, port: int | None, endpoint: str, *, is_standalone: bool) -> tuple[str, int | None]:
    """Where node 0 listens, from the two spellings; giving both is an error."""
    if is_standalone and (address is not None or port is not None or endpoint):
        raise InvalidArgument(
            "--standalone chooses address and port by itself",
            hint="leave out --master-addr, --master-port and --rdzv-endpoint",
        )
    if endpoint:
        if address is not None or port is not None:
            raise InvalidArgument(
                "--rdzv-endpoint and --master-addr/--master-port say the same thing twice", hint="give one of the two"
            )
        address, port = parse_endpoint(endpoint)
    return (address or LOOPBACK).strip("[]"), port


def _own_tls(certificate: Path | None, key: Path | None, authority: Path | None, *, wanted: bool) -> JobTls | None:
    """The user's own certificate, checked; None if there is none to use."""
    if certificate is None and key is None and authority is None:
        return None
    if not wanted:
        raise InvalidArgument("--tls-cert, --tls-key and --tls-ca have no effect without --tls", hint="add --tls")
    if certificate is None or key is None:
        raise InvalidArgument("--tls-cert and --tls-key belong together, and --tls-ca needs both")
    from torsh_distributed.comm.trust.job_tls import JobTls

    found = JobTls(
        certificate=certificate.resolve(),
        key=key.resolve(),
        authority=None if authority is None else authority.resolve(),
    )
    found.server_context()
    return found


def _check_backend(name: str) -> None:
    if name not in ("static", "c10d"):
        raise FeatureNotAvailable(
            f"the rendezvous backend {name!r} is not supported",
            hint="leave out --rdzv-backend: the launcher of node 0 brings the nodes together",
            rdzv_backend=name,
        )


def _parse_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument("--local-ranks-filter must be numbers with commas", got=text) from None


def _read_token(path: Path | None) -> str | None:
    from torsh_distributed.comm.trust.job_secret import TOKEN_VARIABLE, read_or_create_secret_file

    return read_or_create_secret_file(path) if path is not None else os.environ.get(TOKEN_VARIABLE) or None


def read_plan(path: Path | None, *, num_ranks: int) -> Plan | None:
    """The plan of the workers, after the check of `torsh plan validate` for their number.

    Exits with status 2, as for any other wrong option, if the plan cannot run.
    """
    if path is None:
        return None
    from torsh_distributed.plan import Plan

    try:
        # As the workers read it: variables TORSH_PLAN__SECTION__KEY win over the file.
        plan = Plan.compose(path, environ=os.environ)
        plan.validate(num_ranks)
    except ConfigurationError as error:
        print_error(error)
        raise typer.Exit(2) from error
    return plan
