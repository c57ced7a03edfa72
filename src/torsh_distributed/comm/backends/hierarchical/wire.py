"""The wire of the `torsh` backend: shared memory inside a node, and every byte crosses between nodes once.

Why: the link between nodes is the slow one. A flat ring sends nearly two buffers per node over it and also uses
loopback sockets inside the node; here a node first folds its ranks' data in memory and then sends it in shards.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Union

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.hierarchical.inter_node import InterNodeGroup
from torsh_distributed.comm.backends.hierarchical.nodes import NodeLayout
from torsh_distributed.comm.backends.hierarchical.tls_group import TlsInterNodeGroup
from torsh_distributed.comm.backends.wire import Call, Wire
from torsh_distributed.comm.reduce_op import ReduceOp, is_integer
from torsh_distributed.errors import FeatureNotAvailable

if TYPE_CHECKING:
    from torsh_distributed.comm.backends.hierarchical.mpi_inter_node import MpiInterNodeGroup

# Below this, one message of the leader is faster than several shards.
_SMALL_BYTES = 32 * 1024
# Large buffers travel in pieces: while one is between the nodes, the next is folded in memory. The first and the last
# are small because the link is idle while the first is folded and while the last is gathered.
_PIECE_BYTES = 4 * 1024 * 1024
_EDGE_BYTES = 256 * 1024
# Up to this, a buffer travels in one piece.
_ALONE_BYTES = 1024 * 1024


BetweenNodes = Union[InterNodeGroup, TlsInterNodeGroup, "MpiInterNodeGroup"]  # MPI's is not imported until it is used
"""Ranks of several nodes: over gloo, encrypted, or over MPI."""


class HierarchicalWire(Wire):
    """Ranks on several nodes: `node` joins those of this node, `shard_group` those at this position of every node.

    `shard_group` is None on ranks beyond the smallest node's size; `all_ranks` is for operations without a hierarchy.
    """

    name: ClassVar[str] = "torsh"
    takes_gpu: ClassVar[bool] = True

    def __init__(
        self, layout: NodeLayout, node: Wire, shard_group: BetweenNodes | None, all_ranks: BetweenNodes
    ) -> None:
        self.rank = layout.rank
        self.num_ranks = sum(map(len, layout.nodes))
        self._layout = layout
        self._node = node
        self._shard_group = shard_group
        self._all_ranks = all_ranks
        self._is_leader = layout.position == 0

    @override
    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        if op is ReduceOp.MEAN and is_integer(dtype):
            return False  # the group folds it with torch
        folded = _without_mean(op)
        return self._node.supports(folded, dtype) and self._all_ranks.supports(folded, dtype)

    @override
    def barrier(self, call: Call) -> None:
        self._node.barrier(call)
        self._led(lambda group: group.barrier(call))
        self._node.barrier(call)

    @override
    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        flat, folded = buffer.view(-1), _without_mean(op)
        if flat.numel() * flat.element_size() <= _SMALL_BYTES:
            self._fold_to_leaders(flat, folded, call)
            self._node.broadcast(flat, 0, call)
        else:
            self._all_reduce_in_shards(flat, folded, call)
        if op is ReduceOp.MEAN:
            buffer.div_(self.num_ranks)

    def _fold_to_leaders(self, flat: Tensor, op: ReduceOp, call: Call) -> None:
        """The fold over all ranks, in the buffer of each node's first rank."""
        self._node.reduce(flat, op, 0, call)
        self._led(lambda group: group.all_reduce(flat, op, call))

    def _all_reduce_in_shards(self, flat: Tensor, op: ReduceOp, call: Call) -> None:
        """For each piece: reduce-scatter on the node, fold the shards between nodes, all-gather on the node."""
        # Any: what has been started is the group's own kind of handle.
        pending: list[tuple[list[Tensor], Tensor, Any]] = []
        is_alone, started_s, link_bytes = flat.nbytes <= _ALONE_BYTES, 0.0, 0
        for piece in [flat] if is_alone else torch.split(flat, _piece_numels(flat)):
            shards = self._shards(piece)
            mine = torch.empty_like(shards[self._layout.position])
            self._node.reduce_scatter(mine, shards, op, call)
            # The clock starts here: before, the ranks of the node wait for each other.
            started_s, link_bytes = started_s or time.monotonic(), link_bytes + mine.nbytes
            started = None
            if self._shard_group is not None and mine.numel():
                started = self._shard_group.start_all_reduce(mine, op, call, is_alone=is_alone)
            pending.append((shards, mine, started))
        for shards, mine, started in pending:
            if started is not None and self._shard_group is not None:
                self._shard_group.finish(started, call)
            self._node.all_gather(shards, mine, call)
        if self._shard_group is not None and not is_alone:
            self._shard_group.timed(link_bytes, time.monotonic() - started_s, call)

    def _shards(self, piece: Tensor) -> list[Tensor]:
        """One shard for each rank of this node, cut the same way on all nodes; empty for ranks beyond `num_shards`."""
        num_shards = self._layout.num_shards
        edges = [index * piece.numel() // num_shards for index in range(num_shards + 1)]
        shards = [piece[start:stop] for start, stop in itertools.pairwise(edges)]
        return shards + [piece[:0]] * (len(self._layout.local_ranks) - num_shards)

    @override
    def reduce(self, buffer: Tensor, op: ReduceOp, root: int, call: Call) -> None:
        # The other ranks keep their values, so fold in a copy.
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
        self._led(lambda group: group.broadcast(buffer.view(-1), home, call))
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
            self._led(lambda group: group.all_gather(list(rows.unbind()), mine, call))
        self._node.broadcast(rows, 0, call)
        for row, ranks in zip(rows, self._layout.nodes, strict=True):
            if self.rank not in ranks:
                _fill([outputs[rank] for rank in ranks], row)

    @override
    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        folded = _without_mean(op)
        # One block per node: what that node receives, cut into shards. Each shard group folds its shard of every block.
        blocks = [torch.cat([sources[rank].view(-1) for rank in ranks]) for ranks in self._layout.nodes]
        cut = [self._shards(block) for block in blocks]
        by_local_rank = [torch.cat(parts) for parts in zip(*cut, strict=True)]
        mine = torch.empty_like(by_local_rank[self._layout.position])
        self._node.reduce_scatter(mine, by_local_rank, folded, call)
        block = blocks[self._layout.node_index]
        shards = self._shards(block)
        shard = shards[self._layout.position].clone()
        if self._shard_group is not None:
            sizes = [shards_of[self._layout.position].numel() for shards_of in cut]
            self._reduce_scatter_shard(shard, list(torch.split(mine, sizes)), folded, call)
        self._node.all_gather(shards, shard, call)
        start = sum(sources[rank].numel() for rank in self._layout.local_ranks[: self._layout.position])
        output.view(-1).copy_(block[start : start + output.numel()])
        if op is ReduceOp.MEAN:
            output.div_(self.num_ranks)

    def _reduce_scatter_shard(self, shard: Tensor, parts: list[Tensor], op: ReduceOp, call: Call) -> None:
        """gloo scatters equal sizes: pad to the largest."""
        assert self._shard_group is not None
        longest = max(part.numel() for part in parts)
        padded = [torch.nn.functional.pad(part, (0, longest - part.numel())) for part in parts]
        result = padded[0].new_empty(longest)
        if longest:
            self._shard_group.reduce_scatter(result, padded, op, call)
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
        self._all_ranks.all_to_all(incoming, outgoing, taken, given, call)
        _fill([part for rank, part in enumerate(outputs) if rank not in local], incoming)

    @override
    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        if peer in self._layout.local_ranks:
            self._node.send(buffer, self._layout.local_ranks.index(peer), tag, work, call)
        else:
            self._all_ranks.send(buffer, peer, tag, work, call)

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
            self._all_ranks.receive(buffer, peer, tag, work, call)

    @override
    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        self._node.help_with(work, timeout_s)

    @override
    def abort(self, reason: str) -> None:
        self._node.abort(reason)
        for group in (self._shard_group, self._all_ranks):
            if group is not None:
                group.abort(reason)

    @override
    def close(self) -> None:
        self._node.close()
        for group in (self._shard_group, self._all_ranks):
            if group is not None:
                group.close()

    def _led(self, act: Callable[[BetweenNodes], None]) -> None:
        """Run `act` on the leader of each node, in the group of the first shard."""
        if self._is_leader:
            assert self._shard_group is not None, "position 0 carries a shard in every layout"
            act(self._shard_group)


def _piece_numels(flat: Tensor) -> list[int]:
    """The sizes of the pieces: they grow from the beginning of a buffer and shrink towards its end."""
    edge, most = _EDGE_BYTES // flat.element_size(), _PIECE_BYTES // flat.element_size()
    numels, left = [], flat.numel()
    while left:
        done = flat.numel() - left
        numels.append(min(max(min(done, left // 2, most), edge), left))
        left -= numels[-1]
    return numels


def _without_mean(op: ReduceOp) -> ReduceOp:
    """A mean is a sum divided once at the end: dividing on every level would round more often."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _fill(parts: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the beginning of `flat` into the parts, one after the other."""
    start = 0
    for part in parts:
        part.view(-1).copy_(flat[start : start + part.numel()])
        start += part.numel()
