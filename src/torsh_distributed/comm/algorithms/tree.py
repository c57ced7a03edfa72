"""Tree all-reduce: fold towards one rank along a binomial tree, then send the result back down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, MeasuredCosts
from torsh_distributed.comm.algorithms.channel import Channel
from torsh_distributed.comm.folding import finish_fold, fold_into
from torsh_distributed.comm.reduce_op import ReduceOp


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
