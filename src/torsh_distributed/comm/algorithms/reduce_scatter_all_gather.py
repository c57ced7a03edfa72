"""Reduce-scatter and all-gather, directly: every rank owns a shard and talks to all others at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, Channel, MeasuredCosts
from torsh_distributed.comm.folding import finish_fold, fold_into
from torsh_distributed.comm.reduce_op import ReduceOp


@dataclass(frozen=True)
class ReduceScatterAllGather(Algorithm):
    """Each rank folds its shard of all buffers, in the order of ranks, and sends it to all ranks.

    Why: two rounds for any number of ranks, with the 2(p-1)/p of the buffer that a ring needs; and since one rank
    holds all contributions to an element, it can add them in a fixed order. Costs p-1 messages at once in each round
    and memory for one more buffer: 2(α + (p-2)μ) + 2(p-1)/p·nβ.
    """

    name = "reduce_scatter_all_gather"
    keeps_rank_order = True

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        shards = flat.tensor_split(channel.size)
        fold_own_shard(shards, op, channel)
        own, others = shards[channel.position], _others(channel)
        received = [channel.receive(shards[peer], peer) for peer in reversed(others)]
        channel.wait(*[channel.send(own, peer) for peer in others], *received)

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        size = costs.num_ranks
        others_bytes = num_bytes * (size - 1) / size
        return 2 * costs.flat.exchange_s(others_bytes, size - 1) + others_bytes * costs.fold_byte_s


def fold_own_shard(shards: tuple[Tensor, ...], op: ReduceOp, channel: Channel) -> None:
    """Fold this rank's shard over all ranks, in their order, in place. shards: one for each position."""
    own, others = shards[channel.position], _others(channel)
    buffers = [own.new_empty(own.numel()) for _ in range(channel.size)]
    received = {peer: channel.receive(buffers[peer], peer) for peer in reversed(others)}
    sent = [channel.send(shards[peer], peer) for peer in others]
    buffers[channel.position] = own.clone()
    channel.wait(received.get(0))
    own.copy_(buffers[0])
    for peer in range(1, channel.size):
        channel.wait(received.get(peer))
        fold_into(own, buffers[peer], op)
    finish_fold(own, op, channel.size)
    channel.wait(*sent)


def _others(channel: Channel) -> list[int]:
    """Every other position, from the next one on, so no two ranks start with the same peer."""
    return [(channel.position + distance) % channel.size for distance in range(1, channel.size)]
