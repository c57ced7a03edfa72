"""What a job is: the command, how many processes on how many nodes, and which worker has which rank.

Pure: a `JobSpec` is checked when it is constructed, before any process or socket exists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torsh_distributed.comm.trust.job_tls import JobTls
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.known_variables import DEFAULT_MASTER_PORT
from torsh_distributed.observe.settings import ObserveSettings

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

LOOPBACK = "127.0.0.1"
MAX_WORKERS_PER_NODE = 4096


class EntryKind(StrEnum):
    """How the target of a job is started."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What every worker runs: a Python script, a module as with `python -m`, or a bare command."""

    kind: EntryKind = EntryKind.SCRIPT
    target: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlace:
    """One worker's position in the world."""

    rank: int
    local_rank: int
    node_rank: int


OnLoss = Literal["replace", "shrink", "wait", "restart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoverySpec:
    """A program that prints the hosts of a job and their slots. It is asked again and again while the job runs."""

    command: tuple[str, ...]
    """The program and its arguments."""

    default_slots: int = 1
    """Slots of a host for which it prints none."""

    cooldown_s: tuple[float, float] | None = None
    """Least and most time that a host on which a worker failed gets no new one; None: for good."""

    interval_s: float = 1.0
    """Time between two questions."""

    timeout_s: float = 30.0
    """How long an answer may take."""

    is_asked_elsewhere: bool = False
    """Whether the process that started this launcher over SSH asks: then other nodes may join the running job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticSpec:
    """How a job goes on when workers come and go."""

    min_workers: int = 1
    """With fewer it waits for replacements, or ends where there are none."""

    max_workers: int = 64
    """More are not let in."""

    on_loss: OnLoss = "replace"
    """After a loss: go on and replace the worker, go on smaller, wait for the replacement, or restart all."""

    max_replacements: int = 100
    """Workers started in place of lost ones, in all; afterwards the job goes on smaller."""

    stop_timeout_s: float = 0.4
    """How long a worker may be stopped (SIGSTOP) before it is given up."""

    hang_timeout_s: float = 10.0
    """How long native code may hold Python's lock before the worker is given up."""

    wait_timeout_s: float = 300.0
    """How long training waits for capacity."""

    discovery: DiscoverySpec | None = None
    """What says how many workers each host takes; None leaves their number to the user and the plan."""

    def __post_init__(self) -> None:
        _at_least("min_workers", self.min_workers, 1)
        if self.max_workers < self.min_workers:
            raise InvalidArgument(
                f"min_workers {self.min_workers} is above max_workers {self.max_workers}",
                hint="lower --min-workers or raise --max-workers",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """A job as the user asked for it, on this node."""

    entry: Entry
    """What the workers run."""

    nproc_per_node: int = 1
    """Workers on each node."""

    workers_by_node: tuple[int, ...] = ()
    """Workers on each node where they differ; empty if nproc_per_node says it."""

    nnodes: int = 1
    """Nodes of the job; `torsh run` is started once on each."""

    node_rank: int = 0
    """This node's index; node 0 leads: it hosts the store and decides on restarts."""

    master_addr: str = LOOPBACK
    """Address of node 0. Node 0 listens on this address and no other."""

    master_port: int | None = None
    """One node: the store's port, a free one if None. Several: where the launchers meet, 29500 if None."""

    max_restarts: int = 0
    """How often all workers are restarted after a failure."""

    run_id: str = "none"
    """The job's name, the same on every node."""

    role: str = "default"
    """ROLE_NAME of the workers."""

    log_dir: Path | None = None
    """Directory for the stdout and stderr of every rank and attempt; None keeps none."""

    shown_ranks: frozenset[int] | None = None
    """Local ranks whose output is shown; None shows all. Log files are not affected."""

    is_raw: bool = False
    """Whether control characters of ranks reach the terminal as they are."""

    is_verbose: bool = False
    """Whether every rank's traceback is shown, not only the report on the cause."""

    is_json: bool = False
    """Whether the report at the end is one JSON object, for programs."""

    token: str | None = field(default=None, repr=False)
    """The job's secret: launchers and workers prove it to each other. None makes a random one, on one node."""

    wants_tls: bool = False
    """Whether everything between nodes is encrypted; what cannot be is refused."""

    tls: JobTls | None = None
    """Certificate and key of this node. None makes them when the job starts, if it wants TLS."""

    allows_no_token: bool = False
    """Whether several nodes may do without a secret: they then derive one from the run id, which others can too."""

    serves_torch_store: bool = False
    """Whether the workers' store is torch's TCPStore, which asks for no secret."""

    forks_workers: bool = False
    """Whether the first workers, too, are forked from a process that has imported torch."""

    env: dict[str, str] = field(default_factory=dict)
    """Variables of the workers, on top of the launcher's own and the job's."""

    observe: ObserveSettings = field(default_factory=ObserveSettings)
    """Who looks at the job: pages, exports, a report."""

    green: GreenConfig | None = None
    """What the energy of the job is measured with; None measures nothing."""

    energy_record: Path | None = None
    """File of the run with what it has spent and planned, which outlives the launcher. None keeps nothing."""

    health: tuple[str, int] | None = None
    """Address and port of the pages for probes; None serves none."""

    spot_notice: str | None = None
    """The cloud whose notices of taking the machine back are watched for; None watches for none."""

    shutdown_timeout_s: float = 3.0
    """Time from SIGTERM to SIGKILL for the workers that still run after a failure."""

    exit_timeout_s: float = 600.0
    """How long a worker's process may go on after its script has ended, for threads and `atexit` handlers."""

    signal_timeout_s: float = 25.0
    """Time from a forwarded SIGINT, SIGTERM or SIGHUP to SIGKILL, for saving. A second signal ends the wait."""

    join_timeout_s: float = 300.0
    """How long the launchers of all nodes may take to meet."""

    heartbeat_timeout_s: float = 10.0
    """Silence after which a node counts as lost."""

    elastic: ElasticSpec | None = None
    """Whether workers may come and go while the job runs; None keeps the world as it is."""

    port_range: tuple[int, int] | None = None
    """First and last port that this job listens on, for firewalls; None takes any free one."""

    repeats_reports: bool = True
    """Whether nodes other than 0 print node 0's reports too; not where all of them share one terminal."""

    def __post_init__(self) -> None:
        _at_least("nproc_per_node", self.nproc_per_node, 1)
        if self.nproc_per_node > MAX_WORKERS_PER_NODE:
            raise InvalidArgument(
                f"a node has at most {MAX_WORKERS_PER_NODE} workers",
                hint="one per GPU or core is usual: --nproc-per-node auto",
                nproc_per_node=self.nproc_per_node,
            )
        _at_least("nnodes", self.nnodes, 1)
        _at_least("max_restarts", self.max_restarts, 0)
        if self.workers_by_node and len(self.workers_by_node) != self.nnodes:
            raise InvalidArgument("workers_by_node has one number for each node", got=self.workers_by_node)
        for name in (
            "shutdown_timeout_s",
            "exit_timeout_s",
            "signal_timeout_s",
            "join_timeout_s",
            "heartbeat_timeout_s",
        ):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InvalidArgument(f"{name} must be a positive number of seconds", got=value)
        if not 0 <= self.node_rank < self.nnodes:
            raise InvalidArgument(
                f"node rank {self.node_rank} is outside the {self.nnodes} nodes of the job",
                hint=f"--node-rank goes from 0 to {self.nnodes - 1}; give --nnodes on every node",
                node_rank=self.node_rank,
                nnodes=self.nnodes,
            )
        if self.master_port is not None and not 0 <= self.master_port < 2**16:
            raise InvalidArgument("the master port must lie between 0 and 65535", master_port=self.master_port)
        if self.port_range is not None:
            _check_port_range(self.port_range, self.master_port)
        if self.wants_tls and self.serves_torch_store:
            raise InvalidArgument(
                "--tls and --torch-store exclude each other: torch's store has no encryption",
                hint="leave out --torch-store",
            )
        if self.wants_tls and self.allows_no_token:
            raise InvalidArgument(
                "--tls and --no-token exclude each other: the secret says which certificates belong to the job",
                hint="give every node the same --token-file",
            )
        if self.elastic is not None and self.serves_torch_store:
            raise InvalidArgument(
                "--elastic and --torch-store exclude each other: waits in torch's store cannot be ended",
                hint="leave out --torch-store",
            )
        if self.elastic is not None and not (self.elastic.min_workers <= self.world_size <= self.elastic.max_workers):
            raise InvalidArgument(
                f"the job starts with {self.world_size} workers, outside the "
                f"{self.elastic.min_workers} to {self.elastic.max_workers} that it may have",
                hint="change --nproc-per-node, --min-workers or --max-workers",
            )
        if self.nnodes > 1 and self.master_port == 0:
            raise InvalidArgument(
                "with several nodes the master port must be known to all of them",
                hint="give the same --master-port on every node",
                master_port=0,
                nnodes=self.nnodes,
            )
        if not self.run_id or any(not (char.isalnum() or char in "-_.") for char in self.run_id):
            raise InvalidArgument(
                "the run id may hold letters, digits, '-', '_' and '.' only",
                hint="it names directories and appears in the workers' environment",
                run_id=self.run_id,
            )

    @property
    def meeting_port(self) -> int:
        """Where the launchers of several nodes meet."""
        if self.master_port is not None:
            return self.master_port
        return DEFAULT_MASTER_PORT if self.port_range is None else self.port_range[0]

    @property
    def may_restart(self) -> bool:
        """Whether workers may be started later than the others."""
        return self.elastic is not None or self.max_restarts > 0

    @property
    def keeps_spare(self) -> bool:
        """Whether there is a process that has imported torch, to fork workers from."""
        return (self.may_restart or self.forks_workers) and self.entry.kind is not EntryKind.COMMAND

    @property
    def spans_nodes(self) -> bool:
        """Whether it has other nodes, or may get some."""
        discovery = None if self.elastic is None else self.elastic.discovery
        return self.nnodes > 1 or (discovery is not None and discovery.is_asked_elsewhere)

    @property
    def world_size(self) -> int:
        """Workers on all nodes together."""
        return sum(self.workers_by_node) or self.nnodes * self.nproc_per_node

    @property
    def is_leader(self) -> bool:
        """Whether this node decides for the job."""
        return self.node_rank == 0

    def places(self) -> tuple[WorkerPlace, ...]:
        """The workers of this node, ranks counted through the nodes in order."""
        first = sum(self.workers_on(node_rank) for node_rank in range(self.node_rank))
        return tuple(
            WorkerPlace(rank=first + local, local_rank=local, node_rank=self.node_rank)
            for local in range(self.workers_on(self.node_rank))
        )

    def workers_on(self, node_rank: int) -> int:
        """Workers with which that node starts."""
        return self.workers_by_node[node_rank] if self.workers_by_node else self.nproc_per_node


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise InvalidArgument(f"{name} must be at least {minimum}", got=value)


def _check_port_range(ports: tuple[int, int], master_port: int | None) -> None:
    first, last = ports
    if not 0 < first <= last < 2**16:
        raise InvalidArgument(
            "the port range must lie between 1 and 65535, its first port not above its last", port_range=ports
        )
    if master_port is not None and not first <= master_port <= last:
        raise InvalidArgument(
            f"the master port {master_port} is outside the port range {first}-{last}",
            hint="leave out --master-port: the first port of the range is taken",
        )


def parse_port_range(text: str) -> tuple[int, int]:
    """First and last port of `FIRST-LAST`."""
    first, separator, last = text.partition("-")
    if not (separator and first.strip().isdigit() and last.strip().isdigit()):
        raise InvalidArgument("--port-range must read FIRST-LAST", hint="for example 29500-29599", port_range=text)
    return int(first), int(last)


def parse_nproc(text: str) -> int:
    """Workers per node from `N`, `cpu`, `gpu` or `auto`: the GPUs of this node, or its usable cores without any."""
    if text.isascii() and text.isdigit():
        if int(text) == 0:
            raise InvalidArgument("--nproc-per-node must be at least 1", nproc_per_node=0)
        return int(text)
    if text not in ("auto", "cpu", "gpu"):
        raise InvalidArgument(
            "--nproc-per-node must be a number, auto, cpu or gpu",
            hint="auto takes one worker per GPU, or per usable core on a node without GPUs",
            nproc_per_node=text,
        )
    num_gpus = 0 if text == "cpu" else _num_gpus()
    if text == "gpu" and num_gpus == 0:
        raise FeatureNotAvailable(
            "--nproc-per-node gpu needs a GPU that PyTorch can use, and finds none",
            hint="use --nproc-per-node auto, cpu or a number",
            nproc_per_node=text,
        )
    return num_gpus or len(os.sched_getaffinity(0))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def parse_nnodes(text: str) -> int:
    """Nodes of the job from `N` or `N:N`; a range is refused because the world has a fixed size."""
    first, _, last = text.partition(":")
    try:
        least, most = int(first), int(last or first)
    except ValueError:
        raise InvalidArgument("--nnodes must be a number", nnodes=text) from None
    if least != most:
        raise FeatureNotAvailable(
            "--nnodes MIN:MAX with different ends is not supported: the number of nodes is fixed",
            hint=f"give one number, for example --nnodes {most}",
            nnodes=text,
        )
    if least < 1:
        raise InvalidArgument("--nnodes must be at least 1", nnodes=text)
    return least


def parse_health(text: str) -> tuple[str, int]:
    """Address and port of `PORT` (on loopback) or `HOST:PORT`."""
    host, port = (LOOPBACK, int(text)) if text.isascii() and text.isdigit() else parse_endpoint(text)
    if port is None or not 0 <= port < 2**16:
        raise InvalidArgument("--health reads PORT or HOST:PORT", hint="for example --health 8081", health=text)
    return host, port


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Address and port of `HOST`, `HOST:PORT` or `[IPv6]:PORT`."""
    bare = text.strip()
    if bare.startswith("["):
        host, closed, rest = bare[1:].partition("]")
        port_text = rest.removeprefix(":")
        is_sound = bool(closed) and (not rest or rest.startswith(":"))
    elif bare.count(":") > 1:
        host, port_text, is_sound = bare, "", True
    else:
        host, _, port_text = bare.partition(":")
        is_sound = True
    if not host or not is_sound or (port_text and not (port_text.isascii() and port_text.isdigit())):
        raise InvalidArgument(
            "the endpoint must read HOST:PORT",
            hint="an IPv6 address goes in brackets: [fd00::1]:29500",
            endpoint=text,
        )
    return host, int(port_text) if port_text else None
