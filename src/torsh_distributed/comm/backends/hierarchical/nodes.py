"""Which ranks of a group share a node, agreed through the store."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from torsh_distributed.comm.meeting.node_identity import node_identity, pack_nodes, unpack_nodes
from torsh_distributed.comm.meeting.store_meeting import StoreMeeting
from torsh_distributed.errors import ConfigurationError


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a group, in order of their lowest rank, each with its ranks in order; and this rank's place.

    Data travels between nodes in shards. The ranks at one position of every node carry one shard, so there are as many
    shards as the smallest node has ranks; on larger nodes the ranks beyond carry none.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def node_index(self) -> int:
        """The index of this rank's node."""
        return self.node_of(self.rank)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes[self.node_index]

    @property
    def position(self) -> int:
        """This rank's index within its node."""
        return self.local_ranks.index(self.rank)

    @property
    def num_shards(self) -> int:
        """The number of shards in which data travels between nodes."""
        return min(map(len, self.nodes))

    def node_of(self, rank: int) -> int:
        """The index of a rank's node."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)


def find_layout(
    store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float, node: str | None, between: str = "gloo"
) -> NodeLayout:
    """Publish where this rank is and learn where the others are; every rank of the group calls it.

    Ranks are on one node if they give the same name and can share memory. `between`: what carries data between nodes;
    raises ConfigurationError on every rank if they do not all say the same.
    """
    meeting = StoreMeeting(
        store, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s, operation="create the torsh group"
    )
    found = meeting.settle("node", (node, node_identity(), between), _decide)
    if found["dispute"]:
        meeting.leave()
        raise ConfigurationError(
            f"the ranks do not agree on what carries data between nodes: {found['dispute']}",
            hint="give all of them the same TORSH_BETWEEN_NODES, or the same TorshOptions(between=…)",
        )
    members: dict[int, list[int]] = {}
    for other, number in enumerate(unpack_nodes(found["nodes"])):
        members.setdefault(number, []).append(other)
    return NodeLayout(tuple(tuple(ranks) for ranks in members.values()), rank)


def _decide(records: list[tuple[str | None, str, str]]) -> dict[str, str | None]:
    """On rank 0: the node of every rank, and what they do not agree on."""
    wanted: dict[str, list[int]] = {}
    for rank, (_, _, leg) in enumerate(records):
        wanted.setdefault(leg, []).append(rank)
    dispute = ", ".join(f"{leg} on ranks {ranks}" for leg, ranks in sorted(wanted.items()))
    return {
        "nodes": pack_nodes([(name, identity) for name, identity, _ in records]),
        "dispute": dispute if len(wanted) > 1 else None,
    }
