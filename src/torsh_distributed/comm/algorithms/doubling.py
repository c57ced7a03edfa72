"""Recursive doubling: partners swap whole buffers, at distances 1, 2, 4, and so on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, MeasuredCosts
from torsh_distributed.comm.algorithms.channel import Channel
from torsh_distributed.comm.folding import finish_fold, fold_into
from torsh_distributed.comm.reduce_op import ReduceOp


@dataclass(frozen=True)
class Doubling(Algorithm):
    """Whole buffers, swapped with one partner after the other; each swap doubles the ranks a buffer holds the sum of.

    Why: log2(p)·(α + nβ), half of a tree's latencies, because no rank waits for a result to come back down. If p is not
    a power of two, the ranks beyond it send theirs to another first and get the result from it: two latencies more.
    """

    name = "doubling"

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        num_swapping = _largest_power(channel.size)
        beyond = channel.position + num_swapping
        if channel.position >= num_swapping:
            helper = channel.position - num_swapping
            channel.wait(channel.send(flat, helper))
            channel.wait(channel.receive(flat, helper))
            return
        theirs = flat.new_empty(flat.numel())
        if beyond < channel.size:
            channel.wait(channel.receive(theirs, beyond))
            fold_into(flat, theirs, op)
        distance = 1
        while distance < num_swapping:
            partner = channel.position ^ distance
            arriving = channel.receive(theirs, partner)
            channel.wait(channel.send(flat, partner), arriving)
            if partner > channel.position:
                fold_into(flat, theirs, op)
            else:  # the lower rank's values come first on both sides, so both get the same bits
                fold_into(theirs, flat, op)
                flat.copy_(theirs)
            distance *= 2
        finish_fold(flat, op, channel.size)
        if beyond < channel.size:
            channel.wait(channel.send(flat, beyond))

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        num_swapping = _largest_power(costs.num_ranks)
        num_swaps = num_swapping.bit_length() - 1
        exchange_s, fold_s = costs.flat.exchange_s(num_bytes), num_bytes * costs.fold_byte_s
        if num_swapping == costs.num_ranks:
            return num_swaps * (exchange_s + fold_s)
        return num_swaps * (exchange_s + fold_s) + 2 * exchange_s + fold_s


def _largest_power(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)
