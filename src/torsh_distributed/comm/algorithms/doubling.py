"""Recursive doubling: partners swap all they have, at distances 1, 2, 4, and so on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, LinkFigures
from torsh_distributed.comm.algorithms.channel import Lane
from torsh_distributed.comm.collectives.reduce_op import ReduceOp
from torsh_distributed.comm.folding import finish_fold, fold_into


@dataclass(frozen=True)
class Doubling(Algorithm):
    """Whole buffers, swapped with one partner after the other; after each swap a rank knows of twice as many.

    Why: log2(p)·(α + nβ), half of a tree's latencies, for nobody waits for a result to come back down. Where p is no
    power of two, the ranks beyond it hand theirs to another first and get the result from it: two latencies more.
    """

    name = "doubling"

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, lane: Lane) -> None:
        num_swapping = _largest_power(lane.size)
        beyond = lane.position + num_swapping
        if lane.position >= num_swapping:
            helper = lane.position - num_swapping
            lane.wait(lane.send(flat, helper))
            lane.wait(lane.receive(flat, helper))
            return
        theirs = flat.new_empty(flat.numel())
        if beyond < lane.size:
            lane.wait(lane.receive(theirs, beyond))
            fold_into(flat, theirs, op)
        distance = 1
        while distance < num_swapping:
            partner = lane.position ^ distance
            arriving = lane.receive(theirs, partner)
            lane.wait(lane.send(flat, partner), arriving)
            if partner > lane.position:
                fold_into(flat, theirs, op)
            else:  # the lower one's values come first on both: they get the same bits
                fold_into(theirs, flat, op)
                flat.copy_(theirs)
            distance *= 2
        finish_fold(flat, op, lane.size)
        if beyond < lane.size:
            lane.wait(lane.send(flat, beyond))

    @override
    def estimated_s(self, num_bytes: int, figures: LinkFigures) -> float | None:
        num_swapping = _largest_power(figures.num_ranks)
        num_swaps = num_swapping.bit_length() - 1
        exchange_s, fold_s = figures.flat.exchange_s(num_bytes), num_bytes * figures.fold_byte_s
        if num_swapping == figures.num_ranks:
            return num_swaps * (exchange_s + fold_s)
        return num_swaps * (exchange_s + fold_s) + 2 * exchange_s + fold_s


def _largest_power(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)
