"""Double-buffered ring: one half of a shard is folded while the other half travels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, LinkFigures
from torsh_distributed.comm.algorithms.channel import Lane
from torsh_distributed.comm.algorithms.ring import ring_all_reduce
from torsh_distributed.comm.collectives.reduce_op import ReduceOp


@dataclass(frozen=True)
class DoubleBuffered(Algorithm):
    """The ring with two buffers, filled and folded in turns.

    Why: where folding is as slow as the link, the plain ring leaves the link idle while it folds. Costs twice as many
    messages: 2(p-1)(α+μ) + 2(p-1)/p·max(nβ, fold), for large buffers on fast links.
    """

    name = "double_buffered"

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, lane: Lane) -> None:
        ring_all_reduce(flat, op, lane, num_pieces=2)

    @override
    def estimated_s(self, num_bytes: int, figures: LinkFigures) -> float | None:
        size = figures.num_ranks
        shard_bytes = num_bytes / size
        exchange_s = figures.flat.exchange_s(shard_bytes, num_messages=2)
        # Half a shard is always folded with nothing beside it: the last to come.
        exposed_s = max(shard_bytes / 2 * figures.fold_byte_s, shard_bytes * figures.fold_byte_s - exchange_s)
        return (size - 1) * (2 * exchange_s + exposed_s)
