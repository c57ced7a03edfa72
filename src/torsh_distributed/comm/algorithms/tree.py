"""Tree all-reduce: fold towards one rank along a binomial tree, then send the result back down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, Channel, MeasuredCosts
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


class Branch(NamedTuple):
    """A position's place in a binomial tree; the smallest subtree comes first among the children."""

    parent: int | None
    children: tuple[int, ...]


def binomial_branch(position: int, size: int, *, root: int = 0) -> Branch:
    """The tree in which distances double: of 8 positions, 6 has the parent 4 and the child 7."""
    relative = (position - root) % size
    children, distance = [], 1
    while distance < size and not relative & distance:
        if relative + distance < size:
            children.append((relative + distance + root) % size)
        distance *= 2
    parent = None if relative == 0 else (relative - distance + root) % size
    return Branch(parent, tuple(children))


@dataclass(frozen=True)
class Tree(Algorithm):
    """Up and down a binomial tree with the whole buffer.

    Why: 2·log2(p) latencies, so it is for small buffers; every link carries the whole buffer: 2·log2(p)·(α + nβ).
    """

    name = "tree"

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        branch = binomial_branch(channel.position, channel.size)
        buffers = [flat.new_empty(flat.numel()) for _ in branch.children]
        received = [channel.receive(buffer, child) for buffer, child in zip(buffers, branch.children, strict=True)]
        for buffer, transfer in zip(buffers, received, strict=True):
            channel.wait(transfer)
            fold_into(flat, buffer, op)
        if branch.parent is None:
            finish_fold(flat, op, channel.size)
        else:
            channel.wait(channel.send(flat, branch.parent))
        broadcast_down(flat, channel, branch)

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        depth = math.ceil(math.log2(costs.num_ranks))
        return depth * (2 * costs.flat.exchange_s(num_bytes) + num_bytes * costs.fold_byte_s)


def broadcast_down(flat: Tensor, channel: Channel, branch: Branch) -> None:
    """Receive from the parent and send to the children, the largest subtrees first: log2(p)·(α + nβ)."""
    if branch.parent is not None:
        channel.wait(channel.receive(flat, branch.parent))
    channel.wait(*[channel.send(flat, child) for child in reversed(branch.children)])
