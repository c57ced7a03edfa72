"""The environment of a rank on an engine's process: the variables of `torsh run`, for nodes of any number of ranks.

The temporary folder of a rank, with the job's secret in it, and the removal of those whose rank was killed.
An engine kills ranks without a word: nothing in their process could remove the folder. So each holds a lock on a file
in it as long as a process of the rank lives, and who finds the lock free removes the folder: the next rank on the
machine, and the job's driver at its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.comm.store.tcp.tcp_server import tcp_url
from torsh_distributed.comm.trust.job_secret import STORE_VARIABLE
from torsh_distributed.launch.spec import ElasticSpec
from torsh_distributed.launch.worker.launcher_line import JOIN_VARIABLE, MEMBER_VARIABLE, NEWS_VARIABLE

_PREFIX = "torsh-rank-"
_LOCK = "in-use"


@contextlib.contextmanager
def rank_folder() -> Iterator[Path]:
    """A folder of this user's alone, removed at the end; what killed ranks have left is removed first."""
    sweep_rank_folders()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        fd = os.open(folder / f"{_LOCK}.new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Under its name only once it is held: before that, the folder is left alone.
            (folder / f"{_LOCK}.new").rename(folder / _LOCK)
            yield folder
        finally:
            os.close(fd)


def sweep_rank_folders() -> None:
    """Remove the folders of ranks that are gone: this user's own, with a lock that nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another process may remove it meanwhile; what cannot be looked at is not ours to remove.
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    fd = os.open(folder / _LOCK, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(fd)


_NEWS_S = 60.0
"""How long a survivor waits for word about a loss: engines take up to half a minute to miss a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedPlace:
    """One rank's position in the world."""

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    world_size: int


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """Indices of the hosts in the order of their ranks: node after node, in the order in which nodes first appear."""
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda index: (first[nodes[index]], index))


def places_on(nodes: Sequence[str]) -> list[HostedPlace]:
    """The places of ranks 0, 1, …, whose nodes are given in that order; the ranks of a node are neighbours."""
    sizes = Counter(nodes)
    numbers = {node: number for number, node in enumerate(sizes)}
    before = Counter[str]()
    places = []
    for rank, node in enumerate(nodes):
        places.append(
            HostedPlace(
                rank=rank,
                local_rank=before[node],
                local_world_size=sizes[node],
                node_rank=numbers[node],
                num_nodes=len(sizes),
                world_size=len(nodes),
            )
        )
        before[node] += 1
    return places


def joining_place(member: int, node: str, running: Sequence[str]) -> HostedPlace:
    """The place of a worker that joins a running world whose members are on the nodes `running`.

    Its number is beyond the world's: it starts alone, and learns its rank when it is let in.
    """
    distinct = list(dict.fromkeys([*running, node]))
    local_rank = running.count(node)
    return HostedPlace(
        rank=member,
        local_rank=local_rank,
        local_world_size=local_rank + 1,
        node_rank=distinct.index(node),
        num_nodes=len(distinct),
        world_size=member + 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedEndpoint:
    """Where the ranks of one attempt meet, and what they all share."""

    engine: str
    name: str
    attempt: int
    max_restarts: int
    master_addr: str
    master_port: int
    elastic: ElasticSpec | None = None


def rank_variables(place: HostedPlace, endpoint: HostedEndpoint, *, member: int, joins: bool = False) -> dict[str, str]:
    """Every variable that the job sets for a rank. The secret is not among them."""
    variables = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "NODE_RANK": str(place.node_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": endpoint.master_addr,
        "MASTER_PORT": str(endpoint.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(endpoint.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(endpoint.max_restarts),
        "TORCHELASTIC_RUN_ID": endpoint.name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORSH_LAUNCHER": endpoint.engine,
        STORE_VARIABLE: tcp_url(endpoint.master_addr, endpoint.master_port),
    }
    if endpoint.elastic is not None:
        variables[MEMBER_VARIABLE] = str(member)
        waits_s = endpoint.elastic.wait_timeout_s if endpoint.elastic.on_loss == "wait" else 0.0
        variables[NEWS_VARIABLE] = f"{max(_NEWS_S, waits_s):g}"
    if joins:
        variables[JOIN_VARIABLE] = "1"
    return variables
