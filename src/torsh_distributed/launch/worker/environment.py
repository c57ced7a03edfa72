"""This process's place in its job, read from the launcher's environment variables in one place, once.

One function per launcher. The order is: `torsh run`, torchrun, variables set by hand,
Open MPI, MPICH, SLURM, PBS; none of them means a world of one. TORSH_* variables override single values.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.errors import ConfigurationError, RankOutOfBounds

_MOST_NODES = 100_000
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodes(nodelist: str) -> list[str]:
    """Every node of the list in its order: names with any number of bracketed ranges, leading zeros kept."""
    return [name for part in _split(nodelist.strip(), nodelist) for name in _expand_name(part, nodelist)]


def expand_tasks(counts: str) -> list[int]:
    """Tasks on each node of the step: `4(x2),1` gives 4, 4, 1."""
    found: list[int] = []
    for part in counts.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(
                "SLURM's tasks per node cannot be read", hint="they read like 4(x2),1", SLURM_TASKS_PER_NODE=counts
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _split(text: str, nodelist: str) -> list[str]:
    """The names between commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _unreadable(nodelist)
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    if depth:
        raise _unreadable(nodelist)
    parts.append(text[start:])
    if not all(parts):
        raise _unreadable(nodelist)
    return parts


def _expand_name(name: str, nodelist: str) -> list[str]:
    """`rack[1-2]n[01,03]` gives rack1n01, rack1n03, rack2n01, rack2n03."""
    pieces = re.split(r"\[([^\]]*)\]", name)
    choices = [[piece] if index % 2 == 0 else _expand_range(piece, nodelist) for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_range(text: str, nodelist: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, separator, last = part.partition("-")
        if not first.isdigit() or (separator and not last.isdigit()):
            raise _unreadable(nodelist)
        end = int(last or first)
        if not 0 <= end - int(first) < _MOST_NODES:
            raise _unreadable(nodelist)
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), end + 1)]
    return numbers


def _unreadable(nodelist: str) -> ConfigurationError:
    return ConfigurationError(
        "the SLURM node list cannot be read",
        hint="export MASTER_ADDR with the name of the first node",
        SLURM_JOB_NODELIST=nodelist,
    )


_LOOPBACK = known_variables.KNOWN["MASTER_ADDR"].default
_PORT = known_variables.DEFAULT_MASTER_PORT
_LAUNCHERS = {"run": "torsh run", "ray": "Ray", "dask": "Dask"}
"""What TORSH_LAUNCHER may say: all of them set torchrun's variables and serve the store."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A process's place in its job, and where it was read. None: unknown until the ranks meet."""

    source: str
    """The launcher it was read from, as shown to the user."""
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    master_addr: str = _LOOPBACK
    master_port: int = _PORT
    attempt: int = 0
    """How often the launcher has restarted the world; part of the store prefix."""
    has_agent_store: bool = False
    """Whether the launcher hosts the store; otherwise rank 0 does."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigurationError(
                "the world needs at least one rank",
                hint="set WORLD_SIZE to the number of processes of the job",
                world_size=self.world_size,
                source=self.source,
            )
        if not 0 <= self.rank < self.world_size:
            raise RankOutOfBounds(
                f"rank {self.rank} is outside the world of {self.world_size}: ranks are 0 to {self.world_size - 1}",
                rank=self.rank,
                world_size=self.world_size,
                source=self.source,
            )
        local_size = self.world_size if self.local_world_size is None else self.local_world_size
        if not 0 <= (self.local_rank or 0) < local_size <= self.world_size:
            raise ConfigurationError(
                "local_rank must be below local_world_size, and local_world_size at most world_size",
                hint="LOCAL_RANK counts the processes of one node, RANK those of the whole job",
                local_rank=self.local_rank,
                local_world_size=self.local_world_size,
                world_size=self.world_size,
                source=self.source,
            )
        if not 0 < self.master_port < 2**16:
            raise ConfigurationError(
                "the master port must lie between 1 and 65535",
                hint="set MASTER_PORT to a free port of the master node",
                master_port=self.master_port,
                source=self.source,
            )

    @override
    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size}, master {self.master_addr}:{self.master_port}, "
            f"attempt {self.attempt}; found in: {self.source}"
        )


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """This process's place in the job, from the first launcher whose variables are set.

    Raises ConfigurationError if variables are incomplete or contradict each other, and names them.
    """
    variables = _Variables(os.environ if environ is None else environ)
    found = Environment(
        source="nothing: a world of one",
        master_addr=variables.text("MASTER_ADDR") or _LOOPBACK,
        master_port=variables.number("MASTER_PORT", _PORT),
    )
    for detect in (_torsh_run, _torchrun, _by_hand, _open_mpi, _mpich, _slurm, _pbs):
        detected = detect(variables)
        if detected is not None:
            found = detected
            break
    overrides: dict[str, Any] = {
        "rank": variables.maybe("TORSH_RANK"),
        "world_size": variables.maybe("TORSH_WORLD_SIZE"),
        "local_rank": variables.maybe("TORSH_LOCAL_RANK"),
        "node_rank": variables.maybe("TORSH_NODE_ID"),
        "master_addr": variables.text("TORSH_MASTER_ADDR"),
        "master_port": variables.maybe("TORSH_MASTER_PORT"),
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    if given:
        given["source"] = f"{found.source}, TORSH_* for {', '.join(given)}"
    return dataclasses.replace(found, **given)


class _Variables:
    """Typed access to the environment, with errors that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def has(self, name: str) -> bool:
        return name in self._environ

    def text(self, name: str) -> str | None:
        return self._environ.get(name)

    def number(self, name: str, default: int | None = None) -> int:
        value = self.maybe(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigurationError(
                f"{name} is not set, but the variables beside it are",
                hint=f"set {name} too, or start the job with `torsh run`",
                variable=name,
            )
        return value

    def maybe(self, name: str) -> int | None:
        text = self._environ.get(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise ConfigurationError(
                f"{name} must be a whole number", hint=f"set {name} to digits only", variable=name, value=text
            ) from None

    def master(self, rank_count: int, local_count: int | None, source: str) -> dict[str, Any]:
        """Address and port of the store: given, or loopback if all ranks are on one node."""
        addr = self._environ.get("MASTER_ADDR")
        if addr is None and local_count not in (None, rank_count):
            raise ConfigurationError(
                "MASTER_ADDR is not set, and the job spans several nodes",
                hint="export MASTER_ADDR with the address of the node of rank 0",
                source=source,
                world_size=rank_count,
                local_world_size=local_count,
            )
        return {"master_addr": addr or _LOOPBACK, "master_port": self.number("MASTER_PORT", _PORT)}


def _torsh_run(variables: _Variables) -> Environment | None:
    source = _LAUNCHERS.get(variables.text("TORSH_LAUNCHER") or "")
    return None if source is None else _elastic(variables, source)


def _torchrun(variables: _Variables) -> Environment | None:
    return _elastic(variables, "torchrun") if variables.has("TORCHELASTIC_RUN_ID") else None


def _elastic(variables: _Variables, source: str) -> Environment:
    """torchrun's variables, which `torsh run` sets too."""
    return Environment(
        source=source,
        rank=variables.number("RANK"),
        world_size=variables.number("WORLD_SIZE"),
        local_rank=variables.number("LOCAL_RANK"),
        local_world_size=variables.number("LOCAL_WORLD_SIZE"),
        node_rank=variables.number("GROUP_RANK"),
        master_addr=variables.text("MASTER_ADDR") or _LOOPBACK,
        master_port=variables.number("MASTER_PORT"),
        attempt=variables.number("TORCHELASTIC_RESTART_COUNT", 0),
        has_agent_store=variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _by_hand(variables: _Variables) -> Environment | None:
    """RANK and WORLD_SIZE exported by a person or a script; one without the other is an error."""
    if not variables.has("RANK") and not variables.has("WORLD_SIZE"):
        return None
    return Environment(
        source="RANK and WORLD_SIZE",
        rank=variables.number("RANK"),
        world_size=variables.number("WORLD_SIZE"),
        local_rank=variables.maybe("LOCAL_RANK"),
        local_world_size=variables.maybe("LOCAL_WORLD_SIZE"),
        node_rank=variables.maybe("NODE_RANK"),
        master_addr=variables.text("MASTER_ADDR") or _LOOPBACK,
        master_port=variables.number("MASTER_PORT", _PORT),
    )


def _open_mpi(variables: _Variables) -> Environment | None:
    if not variables.has("OMPI_COMM_WORLD_RANK"):
        return None
    size = variables.number("OMPI_COMM_WORLD_SIZE")
    local_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return Environment(
        source="Open MPI",
        rank=variables.number("OMPI_COMM_WORLD_RANK"),
        world_size=size,
        local_rank=variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_size,
        **variables.master(size, local_size, "Open MPI"),
    )


def _mpich(variables: _Variables) -> Environment | None:
    """MPICH's hydra, also Intel MPI: PMI_* for the world, MPI_LOCAL* for the node."""
    if not variables.has("PMI_RANK"):
        return None
    size = variables.number("PMI_SIZE")
    local_size = variables.maybe("MPI_LOCALNRANKS")
    return Environment(
        source="MPICH",
        rank=variables.number("PMI_RANK"),
        world_size=size,
        local_rank=variables.maybe("MPI_LOCALRANKID"),
        local_world_size=local_size,
        **variables.master(size, local_size, "MPICH"),
    )


def _slurm(variables: _Variables) -> Environment | None:
    """Tasks of srun. A batch script also has SLURM_PROCID, but it is not a rank: srun alone sets SLURM_STEP_ID."""
    if not variables.has("SLURM_PROCID") or not variables.has("SLURM_STEP_ID"):
        return None
    nodes = variables.text("SLURM_STEP_NODELIST") or variables.text("SLURM_JOB_NODELIST")
    counts = variables.text("SLURM_STEP_TASKS_PER_NODE")
    node_rank = variables.maybe("SLURM_NODEID")
    tasks = expand_tasks(counts) if counts and node_rank is not None else []
    job_id = variables.number("SLURM_JOB_ID", 0)
    return Environment(
        source="SLURM",
        rank=variables.number("SLURM_PROCID"),
        world_size=variables.number("SLURM_NTASKS"),
        local_rank=variables.maybe("SLURM_LOCALID"),
        local_world_size=tasks[node_rank] if node_rank is not None and node_rank < len(tasks) else None,
        node_rank=node_rank,
        master_addr=variables.text("MASTER_ADDR") or (first_node(nodes) if nodes else _LOOPBACK),
        # Jobs share nodes: a port derived from the job's number keeps them apart.
        master_port=variables.number("MASTER_PORT", 10_000 + job_id % 20_000),
        attempt=variables.number("SLURM_RESTART_COUNT", 0),
    )


def _pbs(variables: _Variables) -> Environment | None:
    """Tasks of pbsdsh: one for each line of PBS_NODEFILE. A batch script has the same variables, but is task 1."""
    path = variables.text("PBS_NODEFILE")
    if path is None or not variables.has("PBS_VNODENUM") or variables.number("PBS_TASKNUM", 1) < 2:
        return None
    hosts = read_node_file(path)
    rank = variables.number("PBS_VNODENUM")
    if not 0 <= rank < len(hosts):
        raise ConfigurationError(
            f"PBS_VNODENUM is {rank}, but PBS_NODEFILE has {len(hosts)} lines",
            hint="ranks are the lines of that file: ask for as many with -l select=N:mpiprocs=M",
            PBS_NODEFILE=path,
        )
    job_id = re.match(r"\d+", variables.text("PBS_JOBID") or "")
    return Environment(
        source="PBS",
        rank=rank,
        world_size=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_world_size=hosts.count(hosts[rank]),
        node_rank=list(dict.fromkeys(hosts)).index(hosts[rank]),
        master_addr=variables.text("MASTER_ADDR") or hosts[0],
        # Jobs share nodes: a port derived from the job's number keeps them apart.
        master_port=variables.number("MASTER_PORT", 10_000 + int(job_id[0] if job_id else 0) % 20_000),
    )


def read_node_file(path: str) -> list[str]:
    """The lines of PBS_NODEFILE: the host of every rank, in order."""
    try:
        hosts = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"PBS_NODEFILE cannot be read: {error}",
            hint="it is on the first node of the job; share it, or use `torsh render pbs`, which needs it there alone",
            PBS_NODEFILE=path,
        ) from error
    if not hosts:
        raise ConfigurationError("PBS_NODEFILE is empty", PBS_NODEFILE=path)
    return hosts


def first_node(nodelist: str) -> str:
    """The first node of SLURM's compressed list: `gpu[007-012,20],login` gives gpu007."""
    return expand_nodes(nodelist)[0]
