"""Double-buffered ring: one half of a shard is folded while the other half travels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, MeasuredCosts
from torsh_distributed.comm.algorithms.channel import Channel
from torsh_distributed.comm.algorithms.ring import ring_all_reduce
from torsh_distributed.comm.reduce_op import ReduceOp


@dataclass(frozen=True)
class DoubleBuffered(Algorithm):
    """The ring with two buffers, filled and folded in turn.

    Why: if folding is as slow as the link, the plain ring leaves the link idle while it folds. Costs twice as many
    messages: 2(p-1)(α+μ) + 2(p-1)/p·max(nβ, fold), so it is for large buffers on fast links.
    """

    name = "double_buffered"

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        ring_all_reduce(flat, op, channel, num_pieces=2)

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        size = costs.num_ranks
        shard_bytes = num_bytes / size
        exchange_s = costs.flat.exchange_s(shard_bytes, num_messages=2)
        # The last half of a shard is always folded while nothing travels.
        exposed_s = max(shard_bytes / 2 * costs.fold_byte_s, shard_bytes * costs.fold_byte_s - exchange_s)
        return (size - 1) * (2 * exchange_s + exposed_s)
