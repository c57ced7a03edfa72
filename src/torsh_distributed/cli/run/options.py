"""The options of `torsh run`, as typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.launch.spec import LOOPBACK

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
        help="Stand in for this library in the workers and take its launcher's options: horovod, deepspeed, fairscale.",
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
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Let control characters of ranks reach the terminal; else they are shown.",
        rich_help_panel=_OUTPUT,
    ),
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
ExitTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds that a worker's process may go on after its script has ended; then it is ended, and said where it"
        " was.",
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
WaitTimeout = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Seconds that training waits for enough workers. Default 300, or the plan's.",
        rich_help_panel=_ELASTIC,
    ),
]
HostDiscoveryScript = Annotated[
    str | None,
    typer.Option(
        help="Program that prints host:slots lines, asked every second: the job grows and shrinks with its answer.",
        rich_help_panel=_ELASTIC,
    ),
]
SlotsPerHost = Annotated[
    int | None,
    typer.Option(min=1, help="Slots of hosts for which the script prints none. Default 1.", rich_help_panel=_ELASTIC),
]
HostCooldown = Annotated[
    str | None,
    typer.Option(
        help="MIN-MAX seconds without new workers for a host on which one failed. Default: for good.",
        rich_help_panel=_ELASTIC,
    ),
]
