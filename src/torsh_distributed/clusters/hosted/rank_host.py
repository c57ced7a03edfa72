"""What an engine offers for ranks to run in: processes that start them, a place for the store, and news of both.

An engine implements `HostPool`; everything else about a job (ranks, restarts, recovery) is the same for all engines
and lives in `hosted_job`.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

from torsh_distributed.comm.meeting.network_interface import network_identity, outward_address
from torsh_distributed.comm.meeting.node_identity import node_identity
from torsh_distributed.comm.meeting.software_versions import comparable
from torsh_distributed.errors import ConfigurationError, SerializationError
from torsh_distributed.launch.spec import Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What a process that can run a rank tells about itself."""

    name: str
    """How messages call it: an actor's or a worker's address."""

    node: str
    """Equal for processes that can share memory; see `node_identity`."""

    network: str
    """Equal for processes that share a loopback."""

    address: str
    """Where other nodes reach this one."""

    pid: int
    python: str
    torch: str
    torsh: str
    gpus: tuple[str, ...] = ()
    """The GPUs that the engine gave to this process alone, as CUDA_VISIBLE_DEVICES names them."""


def own_facts(name: str, *, address: str | None = None, gpus: Sequence[str] = ()) -> HostFacts:
    """The facts of this process. `address` is the one by which its engine knows the node."""
    return HostFacts(
        name=name,
        node=node_identity(),
        network=network_identity(),
        address=address or outward_address() or "127.0.0.1",
        pid=os.getpid(),
        python=platform.python_version(),
        torch=version("torch"),
        torsh=version("torsh-distributed"),
        gpus=tuple(gpus),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionWork:
    """A function that every rank calls, pickled by value where it is not importable."""

    packed: bytes = field(repr=False)
    """A pickle of (function, args, kwargs)."""

    pickler: str
    """The module whose `loads` unpacks it: the engine's own cloudpickle."""

    name: str
    """What messages call the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryWork:
    """A script, module or command that every rank runs as a child of the engine's process."""

    entry: Entry
    working_dir: str | None = None
    """Where it is started; None is the host's own directory."""

    plan: tuple[str, str] | None = None
    """File name and text of the plan; the host writes it down, and the rank finds it in TORSH_PLAN."""

    own_interpreter: bool = False
    """Whether each rank starts an interpreter, instead of being forked from one of its node that has imported torch."""


Work = FunctionWork | EntryWork


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    """One rank of one attempt, as its host receives it."""

    member: int
    """The worker's number, never reused within an attempt; the rank as long as nobody is lost."""

    variables: dict[str, str]
    """The rank's environment, on top of the host's own."""

    secret: str = field(repr=False)
    """The job's secret. The host writes it to a private file; it is in no variable."""

    work: Work
    has_line: bool = False
    """Whether messages pass between the rank and the job: in an elastic job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """Why a rank did not come to its end."""

    kind: str
    """The type of the exception, or how the process ended."""

    message: str
    traceback: str = ""
    exit_code: int = 1
    is_consequence: bool = False
    """Whether it follows from something on another rank."""

    error: BaseException | None = None
    """The exception itself, where it pickles."""

    is_host_lost: bool = False
    """Whether the host is gone with the rank."""

    @property
    def summary(self) -> str:
        """In one line."""
        first = self.message.strip().splitlines()[0] if self.message.strip() else ""
        return f"{self.kind}: {first}" if first else self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """How a rank ended: with a value, or with a failure."""

    value: Any = None
    failure: RankFailure | None = None


# News from the hosts


@dataclass(frozen=True, slots=True)
class HostReady:
    """A host that was asked for with `request` can run a rank."""

    host: RankHost


@dataclass(frozen=True, slots=True)
class HostUnavailable:
    """A host that was asked for with `request` will not come."""

    host_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The rank on this host ended, or the host is lost."""

    host_id: int
    outcome: RankOutcome


@dataclass(frozen=True, slots=True)
class RankSaid:
    """The rank on this host sends a message for the job."""

    host_id: int
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SizeWanted:
    """A user asks for this many ranks."""

    workers: int


@dataclass(frozen=True, slots=True)
class RoomFound:
    """The engine has room for this many ranks: a job may grow. It does not shrink for it: a rank that is lost is news
    of its own, and its policy may be to wait for another."""

    workers: int


HostNews = HostReady | HostUnavailable | RankEnded | RankSaid | SizeWanted | RoomFound


class RankHost(Protocol):
    """A process of the engine that runs one rank at a time."""

    host_id: int
    """Its number in the pool, never reused."""

    facts: HostFacts

    def start(self, task: RankTask) -> None:
        """Run the rank; its end is news."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand a message to the rank's line."""

    def end(self) -> None:
        """End the rank, and the host where the engine gave it to this job alone."""


class HostPool(Protocol):
    """The engine's processes for one job."""

    engine: str
    """The engine's name, as TORSH_LAUNCHER and messages have it."""

    def gather(self, least: int, most: int) -> Sequence[RankHost]:
        """Hosts for `most` ranks, or for at least `least` if there is no more; all of them ready, or an error.

        Raises FeatureNotAvailable with what there is where the engine can never give them, OperationTimeout where it
        did not in time; nothing is held then.
        """

    def request(self, count: int) -> Sequence[int]:
        """Ask for more hosts, and return their numbers; they come as news."""

    def open_store(self, hosts: Sequence[RankHost], secret: str) -> tuple[str, int]:
        """An empty store that asks for the secret and outlives every rank; its address and port."""

    def next_news(self, timeout_s: float) -> HostNews | None:
        """The next news, in order; None if there is none in time."""

    def release(self) -> None:
        """End all ranks and hosts, and wait until nothing of them runs. The pool can gather again."""


_COMPARED = {"python": "Python", "torch": "torch", "torsh": "torsh-distributed"}


def require_fitting(hosts: Sequence[HostFacts], driver: HostFacts, *, engine: str) -> None:
    """Raise ConfigurationError, naming hosts and versions, if ranks on these hosts could not work together.

    Patch versions of Python may differ, and builds of one torch.
    """
    for fact, shown in _COMPARED.items():
        mine = comparable(fact, getattr(driver, fact))
        others = [host for host in hosts if comparable(fact, getattr(host, fact)) != mine]
        if others:
            found = ", ".join(f"{getattr(host, fact)} on {host.name}" for host in others[:4])
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            raise ConfigurationError(
                f"{shown} is {getattr(driver, fact)} here and {found}{more}",
                hint=f"start the workers of {engine} from the same environment as this program",
                engine=engine,
            )
    first: dict[tuple[str, int], HostFacts] = {}
    for host in hosts:
        same = first.setdefault((host.node, host.pid), host)
        if same is not host:
            raise ConfigurationError(
                f"{same.name} and {host.name} are threads of one process, and a rank needs a process of its own",
                hint="start one worker process for each rank, as LocalCluster(processes=True) does",
                engine=engine,
                pid=host.pid,
            )


def visible_gpus(hosts: Sequence[HostFacts], rank: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a rank: all GPUs of its node's ranks, so that its local rank is the index of its own.

    Why all: peers on a node map each other's memory only if they see each other's devices. None without GPUs.
    """
    on_node = [host for host in hosts if host.node == hosts[rank].node]
    if not hosts[rank].gpus:
        return None
    firsts = [host.gpus[0] for host in on_node if host.gpus]
    rest = [gpu for host in on_node for gpu in host.gpus[1:]]
    return ",".join(dict.fromkeys([*firsts, *rest]))


def pack_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, pickler: str
) -> FunctionWork:
    """Pickle the call, before any worker is asked for; raises SerializationError naming what does not pickle."""
    name = getattr(function, "__qualname__", repr(function))
    dumps = importlib.import_module(pickler).dumps
    try:
        packed: bytes = dumps((function, args, dict(kwargs)))
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise SerializationError(
            f"{name} cannot be sent to the workers: {_culprit(dumps, function, args, kwargs)} does not pickle",
            hint="open files, sockets, locks and process groups inside the function, on the worker",
            function=name,
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
        ) from error
    return FunctionWork(packed=packed, pickler=pickler, name=name)


def _culprit(
    dumps: Callable[[Any], bytes], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Which part of the call it is, as the user wrote it."""
    parts: dict[str, Any] = {f"argument {number}": value for number, value in enumerate(args)}
    parts.update({f"argument {key!r}": value for key, value in kwargs.items()})
    closure = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for free, cell in zip(names, closure, strict=False):
        parts[f"{free!r}, which it uses from around it,"] = cell.cell_contents
    for shown, value in parts.items():
        try:
            dumps(value)
        except Exception:  # it is the one
            return f"{shown} ({type(value).__name__})"
    return "the function itself or a global that it uses"
