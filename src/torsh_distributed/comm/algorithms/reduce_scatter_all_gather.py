"""Reduce-scatter and all-gather, directly: every rank owns a shard and talks to all others at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, LinkFigures
from torsh_distributed.comm.algorithms.channel import Lane
from torsh_distributed.comm.collectives.reduce_op import ReduceOp
from torsh_distributed.comm.folding import finish_fold, fold_into


@dataclass(frozen=True)
class ReduceScatterAllGather(Algorithm):
    """Each rank folds its shard of everybody's buffer, in the order of ranks, and sends it to everybody.

    Why: two rounds whatever the number of ranks, with the 2(p-1)/p of the buffer that a ring needs; and since one
    rank holds all contributions to an element, it can add them in a fixed order. Costs p-1 messages at once in each
    round and room for one more buffer: 2(α + (p-2)μ) + 2(p-1)/p·nβ.
    """

    name = "reduce_scatter_all_gather"
    keeps_rank_order = True

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, lane: Lane) -> None:
        shards = flat.tensor_split(lane.size)
        fold_own_shard(shards, op, lane)
        own, others = shards[lane.position], _others(lane)
        received = [lane.receive(shards[peer], peer) for peer in reversed(others)]
        lane.wait(*[lane.send(own, peer) for peer in others], *received)

    @override
    def estimated_s(self, num_bytes: int, figures: LinkFigures) -> float | None:
        size = figures.num_ranks
        others_bytes = num_bytes * (size - 1) / size
        return 2 * figures.flat.exchange_s(others_bytes, size - 1) + others_bytes * figures.fold_byte_s


def fold_own_shard(shards: tuple[Tensor, ...], op: ReduceOp, lane: Lane) -> None:
    """Make this rank's shard the fold of everybody's, in the order of ranks. shards: one for each position."""
    own, others = shards[lane.position], _others(lane)
    buffers = [own.new_empty(own.numel()) for _ in range(lane.size)]
    received = {peer: lane.receive(buffers[peer], peer) for peer in reversed(others)}
    sent = [lane.send(shards[peer], peer) for peer in others]
    buffers[lane.position] = own.clone()
    lane.wait(received.get(0))
    own.copy_(buffers[0])
    for peer in range(1, lane.size):
        lane.wait(received.get(peer))
        fold_into(own, buffers[peer], op)
    finish_fold(own, op, lane.size)
    lane.wait(*sent)


def _others(lane: Lane) -> list[int]:
    """Every other position, from the next one on: no two ranks then begin with the same peer."""
    return [(lane.position + distance) % lane.size for distance in range(1, lane.size)]
