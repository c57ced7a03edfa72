"""Which ranks share a directory of checkpoints: all of them, or those of a node, each node with a disk of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist

from torsh_distributed.comm.collectives.objects import all_gather_object, broadcast_object
from torsh_distributed.comm.meeting.node_identity import node_identity


@dataclass(frozen=True)
class NodeRanks:
    """The ranks that see this rank's directory. The first of them, its keeper, writes what a directory has once."""

    rank: int
    members: tuple[int, ...]
    """Ranks that see the same directory as this one, in order."""
    keepers: tuple[int, ...]
    """The keeper of every directory, in order; rank 0 is one."""

    @classmethod
    def meet(cls, group: dist.ProcessGroup | None, *, per_node: bool) -> Self:
        """Find out; every rank calls this if each node has a directory of its own."""
        if group is None:
            return cls(0, (0,), (0,))
        rank, ranks = group.rank(), range(group.size())
        if not per_node:
            return cls(rank, tuple(ranks), (0,))
        nodes = all_gather_object(node_identity(), group=group)
        keepers = tuple(nodes.index(node) for node in dict.fromkeys(nodes))
        return cls(rank, tuple(one for one in ranks if nodes[one] == nodes[rank]), keepers)

    @property
    def is_keeper(self) -> bool:
        """Whether this rank writes what its directory has once."""
        return self.members[0] == self.rank

    @property
    def has_one_directory(self) -> bool:
        """Whether all ranks see the same directory."""
        return len(self.keepers) == 1

    @property
    def position(self) -> int:
        """This rank's place among its members, who share the work of reading."""
        return self.members.index(self.rank)


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, by rank."""
    return [value] if group is None else all_gather_object(value, group=group)


def first_ranks(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The value of the group's first rank, on every rank."""
    return value if group is None else broadcast_object(value, dist.get_global_rank(group, 0), group=group)
