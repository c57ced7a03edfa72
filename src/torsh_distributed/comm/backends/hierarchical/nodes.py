"""Which ranks of a group share a node, agreed through the store."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from torsh_distributed.comm.meeting.key_wait import wait_for_keys
from torsh_distributed.comm.meeting.rendezvous import node_identity
from torsh_distributed.errors import OperationTimeout


@dataclass(frozen=True)
class Layout:
    """The nodes of a group, in order of their lowest rank, each with its ranks in order; and this rank's place.

    A *lane* joins the ranks at one position of every node. There are as many lanes as the smallest node has ranks, so
    that every node is in every lane; on larger nodes the ranks beyond are in none.
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
    def num_lanes(self) -> int:
        """Lanes, and so shards in which data travels between nodes."""
        return min(map(len, self.nodes))

    def node_of(self, rank: int) -> int:
        """The index of a rank's node."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)


def find_layout(store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float, node: str | None) -> Layout:
    """Say where this rank is and learn where the others are; every rank of the group calls it."""
    store.set(f"node/{rank}", node_identity() if node is None else node)
    keys = [f"node/{other}" for other in range(num_ranks)]
    if not wait_for_keys(store, keys, timeout_s):
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise OperationTimeout(
            f"the ranks of the group did not all say where they are within {timeout_s:g} s",
            hint="every member must create the group; look at the output of the missing ranks",
            operation="create group",
            missing_ranks=missing,
        )
    identities = [bytes(value) for value in store.multi_get(keys)]
    members: dict[bytes, list[int]] = {}
    for other, identity in enumerate(identities):
        members.setdefault(identity, []).append(other)
    return Layout(tuple(tuple(ranks) for ranks in members.values()), rank)
