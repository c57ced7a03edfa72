"""Who keeps the copy of whose state: pure, so every rank knows without asking."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torsh_distributed.errors import CheckpointError


def holders_of(nodes: Sequence[str]) -> list[int]:
    """For every rank the one that keeps its copy: on the next node, at the same place there; on one node the next rank.

    `nodes` is each rank's node. Where nodes have different numbers of ranks, some keep several copies.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return [(rank + 1) % len(nodes) for rank in range(len(nodes))]
    members = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in order}
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [
        members[following[node]][members[node].index(rank) % len(members[following[node]])]
        for rank, node in enumerate(nodes)
    ]


def holders_of_lost(holders: Sequence[int], survivors: Collection[int]) -> dict[int, int]:
    """For every lost rank the survivor that keeps its copy; CheckpointError if that one is lost as well."""
    found = {rank: holder for rank, holder in enumerate(holders) if rank not in survivors}
    gone = {rank: holder for rank, holder in found.items() if holder not in survivors}
    if gone:
        rank, holder = next(iter(gone.items()))
        raise CheckpointError(
            f"the state of rank {rank} is gone from memory: "
            f"rank {rank} and rank {holder}, which kept its copy, are lost",
            hint="load the newest checkpoint from the disk",
            lost=sorted(found),
        )
    return found
