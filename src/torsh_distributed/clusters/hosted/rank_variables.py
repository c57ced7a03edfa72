"""The environment of a rank on an engine's process: the variables of `torsh run`, for nodes of any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torsh_distributed.comm.store.tcp.tcp_server import tcp_url
from torsh_distributed.comm.trust.job_secret import STORE_VARIABLE
from torsh_distributed.launch.spec import ElasticSpec
from torsh_distributed.launch.worker.launcher_line import JOIN_VARIABLE, MEMBER_VARIABLE, NEWS_VARIABLE

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
