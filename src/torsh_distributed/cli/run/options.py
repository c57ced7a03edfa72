"""The options of `torsh run`: each field of a record is one, with its default and the text of `--help`.

NamedTuples, and annotations that are not strings: dataclasses would take 20 ms of every `torsh run`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from torsh_distributed.launch.spec import LOOPBACK

CONTEXT_SETTINGS = {
    # Options after the script belong to the script.
    "allow_interspersed_args": False,
    # torchrun spells its flags with dashes and with underscores.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
_NODES, _WORKERS, _SSH, _OUTPUT = "Nodes", "Workers", "Hosts over SSH", "Output"
_LIMITS, _ELASTIC = "Time limits", "Workers that come and go"

Script = Annotated[str, typer.Argument(help="Script to run; with -m a module, with --no-python a command.")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
Module = Annotated[bool, typer.Option("--module", "-m", help="Run a module, as python -m.", rich_help_panel=_WORKERS)]
NoPython = Annotated[bool, typer.Option("--no-python", help="Run a command as it is.", rich_help_panel=_WORKERS)]
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


class StartMethod(StrEnum):
    """How workers come to be, in torchrun's words."""

    SPAWN = "spawn"
    FORK = "fork"
    FORKSERVER = "forkserver"


class WorkerOptions(NamedTuple):
    """What to run, and in how many processes on each node."""

    script: Script
    script_args: ScriptArgs = None
    nproc_per_node: Annotated[
        str,
        typer.Option(
            help="Workers on each node: a number, cpu, gpu, or auto (GPUs, else usable cores).",
            envvar="PET_NPROC_PER_NODE",
            rich_help_panel=_WORKERS,
        ),
    ] = "1"
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="How often all workers are restarted after a failure. Default 0, with --elastic 3.",
            envvar="PET_MAX_RESTARTS",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    module: Module = False
    no_python: NoPython = False
    share_gpu: Annotated[
        bool,
        typer.Option(
            "--share-gpu",
            help="Let all workers of a node compute on its first GPU, to develop and debug with many ranks.",
            rich_help_panel=_WORKERS,
        ),
    ] = False
    role: Annotated[
        str, typer.Option(help="ROLE_NAME of the workers.", envvar="PET_ROLE", rich_help_panel=_WORKERS)
    ] = "default"
    mpi: Annotated[
        bool, typer.Option("--mpi", help="Make the workers one MPI job (MPICH), for mpi4py.", rich_help_panel=_WORKERS)
    ] = False
    run_as: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Stand in for this library in the workers and take its launcher's options: "
            "horovod, deepspeed, fairscale.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan for the workers (TORSH_PLAN), checked first for their number. auto: rank 0 chooses the best.",
            rich_help_panel=_WORKERS,
        ),
    ] = None
    start_method: Annotated[
        StartMethod,
        typer.Option(
            help="spawn: an interpreter for each worker. forkserver or fork: torch is imported once, and workers are "
            "forked from there.",
            envvar="PET_START_METHOD",
            rich_help_panel=_WORKERS,
        ),
    ] = StartMethod.SPAWN
    torch_store: Annotated[
        bool,
        typer.Option(
            "--torch-store",
            help="Serve torch's TCPStore, which asks for no secret, to programs that open it themselves.",
            rich_help_panel=_WORKERS,
        ),
    ] = False


class NodeOptions(NamedTuple):
    """The nodes of the job, how they find each other, and whom they trust."""

    nnodes: Annotated[str, typer.Option(help="Nodes of the job.", envvar="PET_NNODES", rich_help_panel=_NODES)] = "1"
    node_rank: Annotated[
        int, typer.Option(help="Index of this node.", envvar="PET_NODE_RANK", rich_help_panel=_NODES)
    ] = 0
    master_addr: Annotated[
        str | None,
        typer.Option(
            help=f"Address of node 0; it listens there and nowhere else. Default {LOOPBACK}.",
            envvar="PET_MASTER_ADDR",
            rich_help_panel=_NODES,
        ),
    ] = None
    master_port: Annotated[
        int | None,
        typer.Option(
            help="One node: port of the store (default: a free one). Several: where launchers meet (default 29500).",
            envvar="PET_MASTER_PORT",
            rich_help_panel=_NODES,
        ),
    ] = None
    standalone: Annotated[
        bool, typer.Option("--standalone", help="One node, on loopback, on a free port.", rich_help_panel=_NODES)
    ] = False
    rdzv_backend: Annotated[
        str,
        typer.Option(
            help="static or c10d; both are served by the launcher of node 0.",
            envvar="PET_RDZV_BACKEND",
            rich_help_panel=_NODES,
        ),
    ] = "static"
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            help="HOST:PORT, another spelling of --master-addr and --master-port.",
            envvar="PET_RDZV_ENDPOINT",
            rich_help_panel=_NODES,
        ),
    ] = ""
    rdzv_id: Annotated[
        str | None,
        typer.Option(help="Name of the run, the same on every node.", envvar="PET_RDZV_ID", rich_help_panel=_NODES),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the job's secret, the same on every node, created if missing; otherwise TORSH_JOB_TOKEN.",
            rich_help_panel=_NODES,
        ),
    ] = None
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token",
            help="Several nodes without a secret: whoever reaches the master port can join.",
            rich_help_panel=_NODES,
        ),
    ] = False
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Encrypt everything between nodes, on every node alike; what cannot be is refused.",
            envvar="TORSH_TLS",
            rich_help_panel=_NODES,
        ),
    ] = False
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate of this node, in PEM. Default: one made now.", rich_help_panel=_NODES),
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key.", rich_help_panel=_NODES)] = None
    tls_ca: Annotated[
        Path | None, typer.Option(help="Authority that must have signed the others'.", rich_help_panel=_NODES)
    ] = None
    health: Annotated[
        str | None,
        typer.Option(
            help="Serve /healthz and /readyz for probes at HOST:PORT, or at PORT on loopback.", rich_help_panel=_NODES
        ),
    ] = None
    spot_notice: Annotated[
        str | None,
        typer.Option(
            help="Save and end when this cloud takes the machine back: aws, gcp or azure.", rich_help_panel=_NODES
        ),
    ] = None
    port_range: Annotated[
        str | None,
        typer.Option(
            help="FIRST-LAST: the only ports that launchers, the store and the ranks' backends listen on.",
            rich_help_panel=_NODES,
        ),
    ] = None


class SshOptions(NamedTuple):
    """Hosts to start a job on over SSH, and how to reach them."""

    ssh: Annotated[
        bool,
        typer.Option(
            "--ssh", help="Start one launcher on each of --hosts over SSH, and run from here.", rich_help_panel=_SSH
        ),
    ] = False
    hosts: Annotated[
        str | None,
        typer.Option(help="NAME:WORKERS with commas, as a:4,b:4; the first one leads.", rich_help_panel=_SSH),
    ] = None
    ssh_config: Annotated[
        Path | None,
        typer.Option(help="Configuration of ssh instead of ~/.ssh/config.", rich_help_panel=_SSH),
    ] = None
    ssh_option: Annotated[
        list[str] | None,
        typer.Option(help="A setting of ssh, NAME=VALUE, such as Port=2222.", rich_help_panel=_SSH),
    ] = None
    ssh_python: Annotated[
        str | None,
        typer.Option(help="Python on the hosts. Default: the path of this one.", rich_help_panel=_SSH),
    ] = None
    carry: Annotated[
        list[str] | None,
        typer.Option(
            help="Variable to carry to the hosts, beside those of PyTorch, CUDA, NCCL and this library.",
            rich_help_panel=_SSH,
        ),
    ] = None


class OutputOptions(NamedTuple):
    """What is shown and kept of the job."""

    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Keep stdout and stderr of every rank and attempt here.", envvar="PET_LOG_DIR", rich_help_panel=_OUTPUT
        ),
    ] = None
    local_ranks_filter: Annotated[
        str,
        typer.Option(
            help="Show only these local ranks, such as 0,1.", envvar="PET_LOCAL_RANKS_FILTER", rich_help_panel=_OUTPUT
        ),
    ] = ""
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show every rank's traceback, not the cause alone.", rich_help_panel=_OUTPUT
        ),
    ] = False
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Let control characters of ranks reach the terminal; else they are shown.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False
    json: Annotated[
        bool, typer.Option("--json", help="Report the end as one JSON object on stderr.", rich_help_panel=_OUTPUT)
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, and stop.", rich_help_panel=_OUTPUT)
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Record events of all ranks here and make trace.json of them at the end.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    trace_limit_mb: Annotated[
        float, typer.Option("--trace-limit-mb", min=0.1, help="Most megabytes of a trace.", rich_help_panel=_OUTPUT)
    ] = 200.0


class TimeLimits(NamedTuple):
    """How long to wait for what, in seconds."""

    shutdown_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds from SIGTERM to SIGKILL after a failure.",
            envvar="PET_SHUTDOWN_TIMEOUT",
            rich_help_panel=_LIMITS,
        ),
    ] = 3.0
    exit_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that a worker's process may go on after its script has ended; then it is ended, and said "
            "where it was.",
            rich_help_panel=_LIMITS,
        ),
    ] = 600.0
    signal_timeout: Annotated[
        float, typer.Option(help="Seconds from your signal to SIGKILL: time to save.", rich_help_panel=_LIMITS)
    ] = 25.0
    join_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for the launchers of all nodes to meet.", envvar="TORSH_INIT_TIMEOUT", rich_help_panel=_LIMITS
        ),
    ] = 300.0
    heartbeat_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds of silence after which a node counts as lost: 10, with --elastic 1.", rich_help_panel=_LIMITS
        ),
    ] = None


class ElasticOptions(NamedTuple):
    """Workers that come and go."""

    elastic: Elastic = False
    min_workers: MinWorkers = None
    max_workers: MaxWorkers = None
    on_loss: LossPolicy = None
    wait_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds that training waits for enough workers. Default 300, or the plan's.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None
    host_discovery_script: Annotated[
        str | None,
        typer.Option(
            help="Program that prints host:slots lines, asked every second: the job grows and shrinks with its answer.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None
    slots_per_host: Annotated[
        int | None,
        typer.Option(
            min=1, help="Slots of hosts for which the script prints none. Default 1.", rich_help_panel=_ELASTIC
        ),
    ] = None
    host_cooldown: Annotated[
        str | None,
        typer.Option(
            help="MIN-MAX seconds without new workers for a host on which one failed. Default: for good.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None
