"""Hierarchical all-reduce: fold inside each node, then between nodes, then spread inside each node again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, Channel, MeasuredCosts
from torsh_distributed.comm.algorithms.ring import ring_all_reduce
from torsh_distributed.comm.folding import finish_fold, fold_into
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import InvalidArgument


@dataclass(frozen=True)
class Hierarchical(Algorithm):
    """Each node folds the buffer in shards, equal shards of all nodes are folded in rings, and nodes share the results.

    Why: the link between nodes is the slow one; a node puts 2(N-1)/N of one buffer on it, not of one for each rank.
    With s ranks on the smallest of N nodes there are s shards: 2(α+(s-1)μ) + 2nβ inside a node, and between nodes
    2(N-1)α + 2(N-1)/N·n/s·β in s rings at once. Nodes may be uneven; the ranks beyond s only send and receive.
    """

    name = "hierarchical"

    ranks_per_node: int | None = None
    """None: the nodes on which the ranks met. Otherwise, so many consecutive ranks of the group count as a node."""

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        nodes = self._nodes(channel)
        mine = next(members for members in nodes if channel.position in members)
        num_shards = min(map(len, nodes))
        shards = flat.tensor_split(num_shards)
        # A mean is a sum until all nodes are folded.
        summing = ReduceOp.SUM if op is ReduceOp.MEAN else op
        inside = channel.select(mine)
        here = inside.position
        _fold_inside(shards, summing, inside)
        if here < num_shards:
            between = channel.select([members[here] for members in nodes])
            ring_all_reduce(shards[here], summing, between, num_pieces=1)
            finish_fold(shards[here], op, channel.size)
        _spread_inside(shards, inside)

    def _nodes(self, channel: Channel) -> list[list[int]]:
        """Positions of the channel, node by node."""
        if self.ranks_per_node is None:
            return by_node(node_of_ranks(channel.group))
        size, rest = divmod(channel.size, self.ranks_per_node) if self.ranks_per_node > 0 else (0, 1)
        if rest:
            raise InvalidArgument(
                f"{self.ranks_per_node} ranks per node do not divide the group of {channel.size}",
                hint="leave ranks_per_node out to use the nodes on which the ranks met, which may be uneven",
                ranks_per_node=self.ranks_per_node,
                group_size=channel.size,
            )
        step = self.ranks_per_node
        return [list(range(node * step, (node + 1) * step)) for node in range(size)]

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        if costs.near is None or costs.far is None:
            return None
        num_nodes, num_shards = len(costs.node_sizes), min(costs.node_sizes)
        shard_bytes = num_bytes / num_shards
        inside_s = 2 * costs.near.exchange_s(num_bytes, num_shards) + num_bytes * costs.fold_byte_s
        ring_bytes = shard_bytes / num_nodes
        ring_s = (num_nodes - 1) * (2 * costs.far.exchange_s(ring_bytes) + ring_bytes * costs.fold_byte_s)
        return inside_s + ring_s


def _fold_inside(shards: Sequence[Tensor], op: ReduceOp, inside: Channel) -> None:
    """The first ranks of a node each fold a shard of all its ranks."""
    here = inside.position
    others = [peer for peer in range(inside.size) if peer != here]
    buffers, received = [], []
    if here < len(shards):
        buffers = [shards[here].new_empty(shards[here].numel()) for _ in others]
        received = [inside.receive(buffer, peer) for buffer, peer in zip(buffers, others, strict=True)]
    sent = [inside.send(shard, peer) for peer, shard in enumerate(shards) if peer != here]
    for buffer, transfer in zip(buffers, received, strict=True):
        inside.wait(transfer)
        fold_into(shards[here], buffer, op)
    inside.wait(*sent)


def _spread_inside(shards: Sequence[Tensor], inside: Channel) -> None:
    """The first ranks of a node each send their shard to all its ranks."""
    here = inside.position
    received = [inside.receive(shard, peer) for peer, shard in enumerate(shards) if peer != here]
    sent = (
        [inside.send(shards[here], peer) for peer in range(inside.size) if peer != here] if here < len(shards) else []
    )
    inside.wait(*sent, *received)


def node_of_ranks(group: dist.ProcessGroup) -> list[int]:
    """The node of every rank of the group, as found at the rendezvous."""
    roster = process_group.roster()
    return [roster.node_rank(rank) for rank in dist.get_process_group_ranks(group)]


def by_node(nodes: Sequence[int]) -> list[list[int]]:
    """[0, 0, 1, 0] as [[0, 1, 3], [2]]: the positions of each node, in order of first appearance."""
    found: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        found.setdefault(node, []).append(position)
    return list(found.values())
