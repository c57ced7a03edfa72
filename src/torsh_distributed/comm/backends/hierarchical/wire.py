"""The wire of the `torsh` backend: what stays on a node goes through memory, what leaves it goes once.

Why: the link between nodes is the slow one. A flat ring sends nearly two buffers per node over it and crosses loopback
sockets inside the node besides; here a node folds its ranks' data in memory first and sends one shard per lane.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.hierarchical.inter_node import Folding, Leg
from torsh_distributed.comm.backends.hierarchical.nodes import Layout
from torsh_distributed.comm.backends.reduction_probe import gloo_reductions
from torsh_distributed.comm.backends.wire import Call, Wire
from torsh_distributed.comm.collectives.reduce_op import ReduceOp
from torsh_distributed.errors import FeatureNotAvailable

# Below this, one message of a leader is quicker than a shard of every lane.
_SMALL_BYTES = 32 * 1024
# Pieces in which large buffers travel: while one is between the nodes, the next is folded in memory. The first and the
# last are small: nothing is on the link while the first is folded and while the last is gathered.
_PIECE_BYTES = 4 * 1024 * 1024
_EDGE_BYTES = 256 * 1024
# Up to this, a buffer travels in one piece.
_ALONE_BYTES = 1024 * 1024


class HierarchicalWire(Wire):
    """Ranks on several nodes: `node` joins those of this one, `lane` those at this position of every node.

    `lane` is None on ranks beyond the smallest node's size; `across` joins all ranks, for what has no hierarchy.
    """

    name: ClassVar[str] = "torsh"

    def __init__(self, layout: Layout, node: Wire, lane: Leg | None, across: Leg) -> None:
        self.rank = layout.rank
        self.num_ranks = sum(map(len, layout.nodes))
        self._layout = layout
        self._node = node
        self._lane = lane
        self._across = across
        self._is_leader = layout.position == 0

    @override
    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        folded = _without_mean(op)
        return self._node.supports(folded, dtype) and (folded, dtype) in gloo_reductions()

    @override
    def barrier(self, call: Call) -> None:
        self._node.barrier(call)
        self._led(lambda lane: lane.barrier(call))
        self._node.barrier(call)

    @override
    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        flat, folded = buffer.view(-1), _without_mean(op)
        if flat.numel() * flat.element_size() <= _SMALL_BYTES:
            self._fold_to_leaders(flat, folded, call)
            self._node.broadcast(flat, 0, call)
        else:
            self._all_reduce_in_lanes(flat, folded, call)
        if op is ReduceOp.MEAN:
            buffer.div_(self.num_ranks)

    def _fold_to_leaders(self, flat: Tensor, op: ReduceOp, call: Call) -> None:
        """The fold over all ranks, in the buffer of each node's first rank."""
        self._node.reduce(flat, op, 0, call)
        self._led(lambda lane: lane.finish(lane.start_all_reduce(flat, op, call, is_alone=True), call))

    def _all_reduce_in_lanes(self, flat: Tensor, op: ReduceOp, call: Call) -> None:
        """Piece by piece: fold on the node into a shard per lane, fold each between nodes, gather the shards again."""
        under_way: list[tuple[list[Tensor], Tensor, Folding | None]] = []
        is_alone, started_s, link_bytes = flat.nbytes <= _ALONE_BYTES, 0.0, 0
        for piece in [flat] if is_alone else torch.split(flat, _piece_numels(flat)):
            shards = self._shards(piece)
            mine = torch.empty_like(shards[self._layout.position])
            self._node.reduce_scatter(mine, shards, op, call)
            # From here on, for before it the ranks of the node wait for each other.
            started_s, link_bytes = started_s or time.monotonic(), link_bytes + mine.nbytes
            folding = None
            if self._lane is not None and mine.numel():
                folding = self._lane.start_all_reduce(mine, op, call, is_alone=is_alone)
            under_way.append((shards, mine, folding))
        for shards, mine, folding in under_way:
            if folding is not None and self._lane is not None:
                self._lane.finish(folding, call)
            self._node.all_gather(shards, mine, call)
        if self._lane is not None and not is_alone:
            self._lane.timed(link_bytes, time.monotonic() - started_s, call)

    def _shards(self, piece: Tensor) -> list[Tensor]:
        """One shard for each rank of this node, cut alike on all nodes; empty beyond the lanes."""
        num_lanes = self._layout.num_lanes
        edges = [lane * piece.numel() // num_lanes for lane in range(num_lanes + 1)]
        shards = [piece[start:stop] for start, stop in itertools.pairwise(edges)]
        return shards + [piece[:0]] * (len(self._layout.local_ranks) - num_lanes)

    @override
    def reduce(self, buffer: Tensor, op: ReduceOp, root: int, call: Call) -> None:
        # The others keep their values, so the fold happens in a copy.
        copy = buffer.clone().view(-1)
        self._fold_to_leaders(copy, _without_mean(op), call)
        if self._layout.node_of(root) == self._layout.node_index:
            self._node.broadcast(copy, 0, call)
        if self.rank == root:
            buffer.view(-1).copy_(copy)
            if op is ReduceOp.MEAN:
                buffer.div_(self.num_ranks)

    @override
    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        home = self._layout.node_of(root)
        if self._layout.node_index == home:
            self._node.broadcast(buffer, self._layout.local_ranks.index(root), call)
        self._led(lambda lane: lane.broadcast(buffer.view(-1), home, call))
        if self._layout.node_index != home:
            self._node.broadcast(buffer, 0, call)

    @override
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        local = [outputs[rank] for rank in self._layout.local_ranks]
        self._node.all_gather(local, source, call)
        sizes = [sum(outputs[rank].numel() for rank in ranks) for ranks in self._layout.nodes]
        # One row per node, padded to the largest: gloo gathers equal sizes.
        rows = source.new_empty((len(sizes), max(sizes)))
        if self._is_leader:
            mine = rows[self._layout.node_index].clone()
            torch.cat([part.view(-1) for part in local], out=mine[: sizes[self._layout.node_index]])
            self._led(lambda lane: lane.all_gather(list(rows.unbind()), mine, call))
        self._node.broadcast(rows, 0, call)
        for row, ranks in zip(rows, self._layout.nodes, strict=True):
            if self.rank not in ranks:
                _fill([outputs[rank] for rank in ranks], row)

    @override
    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        folded = _without_mean(op)
        # What each node is to get, cut into a shard per lane: every lane folds its shard of every block.
        blocks = [torch.cat([sources[rank].view(-1) for rank in ranks]) for ranks in self._layout.nodes]
        cut = [self._shards(block) for block in blocks]
        by_local_rank = [torch.cat(parts) for parts in zip(*cut, strict=True)]
        mine = torch.empty_like(by_local_rank[self._layout.position])
        self._node.reduce_scatter(mine, by_local_rank, folded, call)
        block = blocks[self._layout.node_index]
        shards = self._shards(block)
        shard = shards[self._layout.position].clone()
        if self._lane is not None:
            sizes = [shards_of[self._layout.position].numel() for shards_of in cut]
            self._reduce_scatter_in_lane(shard, list(torch.split(mine, sizes)), folded, call)
        self._node.all_gather(shards, shard, call)
        start = sum(sources[rank].numel() for rank in self._layout.local_ranks[: self._layout.position])
        output.view(-1).copy_(block[start : start + output.numel()])
        if op is ReduceOp.MEAN:
            output.div_(self.num_ranks)

    def _reduce_scatter_in_lane(self, shard: Tensor, parts: list[Tensor], op: ReduceOp, call: Call) -> None:
        """gloo scatters equal sizes: pad to the largest."""
        assert self._lane is not None
        longest = max(part.numel() for part in parts)
        padded = [torch.nn.functional.pad(part, (0, longest - part.numel())) for part in parts]
        result = padded[0].new_empty(longest)
        if longest:
            self._lane.reduce_scatter(result, padded, op, call)
        shard.copy_(result[: shard.numel()])

    @override
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, call: Call) -> None:
        nothing = source.view(-1)[:0]
        sources = [source if rank == root else nothing for rank in range(self.num_ranks)]
        self.all_to_all(outputs if outputs is not None else [nothing] * self.num_ranks, sources, call)

    @override
    def scatter(self, output: Tensor, sources: Sequence[Tensor] | None, root: int, call: Call) -> None:
        nothing = output.view(-1)[:0]
        outputs = [output if rank == root else nothing for rank in range(self.num_ranks)]
        self.all_to_all(outputs, sources if sources is not None else [nothing] * self.num_ranks, call)

    @override
    def all_to_all(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], call: Call) -> None:
        local = self._layout.local_ranks
        self._node.all_to_all([outputs[rank] for rank in local], [sources[rank] for rank in local], call)
        given = [0 if rank in local else part.numel() for rank, part in enumerate(sources)]
        taken = [0 if rank in local else part.numel() for rank, part in enumerate(outputs)]
        remote = [part.view(-1) for rank, part in enumerate(sources) if rank not in local]
        outgoing = torch.cat(remote)
        incoming = outgoing.new_empty(sum(taken))
        self._across.all_to_all(incoming, outgoing, taken, given, call)
        _fill([part for rank, part in enumerate(outputs) if rank not in local], incoming)

    @override
    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        if peer in self._layout.local_ranks:
            self._node.send(buffer, self._layout.local_ranks.index(peer), tag, work, call)
        else:
            self._across.send(buffer, peer, tag, work, call)

    @override
    def receive(self, buffer: Tensor, peer: int | None, tag: int, work: PendingWork, call: Call) -> None:
        if peer is None:
            raise FeatureNotAvailable(
                "a receive from any rank is not possible on the torsh backend when the group spans nodes",
                hint="name the sender, or use a gloo group for these messages",
                operation=call.operation,
            )
        if peer in self._layout.local_ranks:
            self._node.receive(buffer, self._layout.local_ranks.index(peer), tag, work, call)
        else:
            self._across.receive(buffer, peer, tag, work, call)

    @override
    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        self._node.help_with(work, timeout_s)

    @override
    def abort(self, reason: str) -> None:
        self._node.abort(reason)
        for leg in (self._lane, self._across):
            if leg is not None:
                leg.abort(reason)

    @override
    def close(self) -> None:
        self._node.close()

    def _led(self, act: Callable[[Leg], None]) -> None:
        """Between nodes, one rank of each speaks: the leader, in the first lane."""
        if self._is_leader:
            assert self._lane is not None, "position 0 is in a lane of every layout"
            act(self._lane)


def _piece_numels(flat: Tensor) -> list[int]:
    """Pieces that grow from the beginning of a buffer and shrink towards its end."""
    edge, most = _EDGE_BYTES // flat.element_size(), _PIECE_BYTES // flat.element_size()
    numels, left = [], flat.numel()
    while left:
        done = flat.numel() - left
        numels.append(min(max(min(done, left // 2, most), edge), left))
        left -= numels[-1]
    return numels


def _without_mean(op: ReduceOp) -> ReduceOp:
    """A mean is a sum, divided once at the end: dividing on every level would round more often."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _fill(parts: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the beginning of `flat` into the parts, one after the other."""
    start = 0
    for part in parts:
        part.view(-1).copy_(flat[start : start + part.numel()])
        start += part.numel()
