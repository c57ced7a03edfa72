"""The mean of sparse messages over the ranks of a group.

Up to three ranks send each other all they have: (P - 1)·S bytes a rank, for messages of S bytes, in one round. From
four on that would grow with the world, so elements are divided among the ranks: each sums up those of its part and
sends back the largest, as many in all as one rank sent. That takes 2·S·(P - 1)/P bytes a rank, whatever P is.

What the owner of a part leaves out of the sum is accounted for in its own `sent`: at every element the ranks' `sent`
add up to P times the mean, so that error feedback loses nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import all_gather, all_to_all_single
from torsh_distributed.compress.codecs.base import Averaged
from torsh_distributed.compress.codecs.sparse.selection import largest
from torsh_distributed.compress.messages.envelope import Notice, Shape, open_message, seal
from torsh_distributed.compress.messages.indices import nonzero
from torsh_distributed.compress.messages.sparse import (
    Sparse,
    SparseVector,
    decode_sparse,
    encode_sparse,
    most_sparse_bytes,
    sparse_bytes,
)
from torsh_distributed.errors import CompressionError

_BLOCK_BITS = 6
_BLOCK = 1 << _BLOCK_BITS
_MOST_FOR_ALL_GATHER = 3
_COUNT_BYTES = 8


class Wire(NamedTuple):
    """How the messages of a codec travel: the same on all ranks."""

    signature: int
    dtype: torch.dtype

    def shape(self, num_elements: int, count: int) -> Shape:
        """A message with exactly so many elements."""
        return Shape(self.signature, num_elements, sparse_bytes(num_elements, count, self.dtype))

    def room(self, num_elements: int, most: int) -> Shape:
        """A message with at most so many elements, and zeros after them."""
        return Shape(self.signature, num_elements, most_sparse_bytes(num_elements, most, self.dtype))

    def write(self, sparse: Sparse, shape: Shape) -> Tensor:
        """The message in its envelope."""
        message = torch.zeros(shape.message_bytes, dtype=torch.uint8, device=sparse.values.device)
        payload = encode_sparse(sparse, shape.num_elements, self.dtype)
        shape.payload_of(message)[: payload.numel()] = payload
        seal(message, shape)
        return message

    def read(self, message: Tensor, shape: Shape, *, sender: int, rank: int) -> Sparse:
        """What it says; raises CompressionError, naming both ranks, where it is damaged or not what was expected."""
        try:
            opened = open_message(message[: shape.message_bytes], shape)
            if opened.notice is Notice.REFUSED:
                raise CompressionError(
                    f"rank {sender} could not decode the sparse message of rank {opened.subject}",
                    hint=f"look at the network and memory of rank {opened.subject}; rank {sender} says more",
                )
            return decode_sparse(opened.payload, shape.num_elements, self.dtype, is_padded=True)
        except CompressionError as error:
            error.context.update(from_rank=sender, rank=rank)
            raise


def average_sparse(own: Sparse, num_elements: int, group: dist.ProcessGroup, wire: Wire, *, is_fixed: bool) -> Averaged:
    """Average what the ranks selected; every rank calls it.

    `is_fixed` says that all ranks selected equally many, so that nobody needs to be told how many.
    """
    if group.size() == 1:
        said = decode_sparse(encode_sparse(own, num_elements, wire.dtype), num_elements, wire.dtype)
        alone = SparseVector((said,), num_elements)
        return Averaged(alone, alone, 0)
    if group.size() <= _MOST_FOR_ALL_GATHER:
        return _by_all_gather(own, num_elements, group, wire, is_fixed=is_fixed)
    return _by_parts(own, num_elements, group, wire)


def _by_all_gather(own: Sparse, num_elements: int, group: dist.ProcessGroup, wire: Wire, *, is_fixed: bool) -> Averaged:
    """Every rank gets every message and adds them up in the order of ranks."""
    num_ranks, rank = group.size(), group.rank()
    most, told_bytes = own.indices.numel(), 0
    shape = wire.shape(num_elements, most)
    if not is_fixed:
        most = max(count for (count,) in _gather_counts([most], group, own.values.device))
        shape = wire.room(num_elements, most)
        told_bytes = _COUNT_BYTES
    gathered = all_gather(wire.write(own, shape), group=group)
    said = tuple(wire.read(message, shape, sender=sender, rank=rank) for sender, message in enumerate(gathered))
    mean = SparseVector(said, num_elements).scaled(1 / num_ranks)
    sent = SparseVector((said[rank],), num_elements)
    return Averaged(mean, sent, (num_ranks - 1) * (shape.message_bytes + told_bytes))


def _by_parts(own: Sparse, num_elements: int, group: dist.ProcessGroup, wire: Wire) -> Averaged:
    """Every rank adds up its part of the elements and gives the largest sums to all."""
    num_ranks, rank = group.size(), group.rank()
    parts = Parts(num_elements, num_ranks)
    pieces = parts.split(own)
    counts = _gather_counts([piece.indices.numel() for piece in pieces], group, own.values.device)
    messages = [
        wire.write(piece, wire.shape(parts.numel(part), piece.indices.numel())) for part, piece in enumerate(pieces)
    ]
    shapes = [wire.shape(parts.numel(rank), row[rank]) for row in counts]
    sizes = [message.numel() for message in messages]
    received = all_to_all_single(torch.cat(messages), sizes, [shape.message_bytes for shape in shapes], group=group)

    sent = []
    for part, (piece, message) in enumerate(zip(pieces, messages, strict=True)):
        said = wire.read(message, wire.shape(parts.numel(part), piece.indices.numel()), sender=rank, rank=rank)
        sent.append(parts.in_whole(said, part))

    # As many as one rank sent on average, divided evenly: the parts are interleaved, so each has its share of them.
    budget = -(-sum(map(sum, counts)) // num_ranks**2)
    rooms = [wire.room(parts.numel(part), budget) for part in range(num_ranks)]
    size = max(room.message_bytes for room in rooms)
    gathered, sums = _share_sums(received, shapes, budget, rooms[rank], size, group, wire)
    found = tuple(
        parts.in_whole(wire.read(message, rooms[part], sender=part, rank=rank), part)
        for part, message in enumerate(gathered)
    )
    sent += [parts.in_whole(Sparse(sums.indices, -sums.values), rank), found[rank]]
    return Averaged(
        SparseVector(found, num_elements).scaled(1 / num_ranks),
        SparseVector(tuple(sent), num_elements),
        sum(sizes) - sizes[rank] + (num_ranks - 1) * (size + _COUNT_BYTES * num_ranks),
    )


def _share_sums(
    received: Tensor,
    shapes: Sequence[Shape],
    budget: int,
    room: Shape,
    size: int,
    group: dist.ProcessGroup,
    wire: Wire,
) -> tuple[list[Tensor], Sparse]:
    """Sum up this rank's part and gather the largest sums of all ranks: their messages, and all of one's own sums."""
    rank = group.rank()
    problem: CompressionError | None = None
    try:
        sums = _sum_up(received, shapes, rank, wire)
    except CompressionError as error:
        # The others wait in the all-gather: they learn there what happened, and raise too.
        problem = error
        message = torch.zeros(room.message_bytes, dtype=torch.uint8, device=received.device)
        seal(message, room, notice=Notice.REFUSED, subject=int(error.context["from_rank"]))
    else:
        chosen = largest(sums.values, budget)
        message = wire.write(Sparse(sums.indices.index_select(0, chosen), sums.values.index_select(0, chosen)), room)
    gathered = all_gather(torch.nn.functional.pad(message, (0, size - message.numel())), group=group)
    if problem is not None:
        raise problem
    return gathered, sums


def _sum_up(received: Tensor, shapes: Sequence[Shape], rank: int, wire: Wire) -> Sparse:
    """The sum of several messages, one after the other, at every element that one of them names."""
    num_elements = shapes[0].num_elements
    total = torch.zeros(num_elements, device=received.device)
    is_named = torch.zeros(num_elements, dtype=torch.bool, device=received.device)
    messages = received.split_with_sizes([shape.message_bytes for shape in shapes])
    for sender, (message, shape) in enumerate(zip(messages, shapes, strict=True)):
        found = wire.read(message, shape, sender=sender, rank=rank)
        total.index_add_(0, found.indices, found.values)
        is_named.index_fill_(0, found.indices, True)
    indices = nonzero(is_named)
    return Sparse(indices, total.index_select(0, indices))


class Parts(NamedTuple):
    """Elements dealt out to the ranks in small blocks, in turn.

    Why not a range each: large gradients come in runs, a layer or a row, and would fall to few ranks.
    """

    num_elements: int
    num_ranks: int

    def numel(self, part: int) -> int:
        """How many elements that rank owns."""
        rounds, rest = divmod(self.num_elements, _BLOCK * self.num_ranks)
        return rounds * _BLOCK + min(max(rest - part * _BLOCK, 0), _BLOCK)

    def split(self, sparse: Sparse) -> list[Sparse]:
        """Elements by their owner; indices count the owner's elements, and are increasing."""
        blocks = sparse.indices >> _BLOCK_BITS
        owners = blocks % self.num_ranks
        order = owners.argsort(stable=True)
        local = (blocks // self.num_ranks << _BLOCK_BITS) + (sparse.indices & _BLOCK - 1)
        counts = owners.bincount(minlength=self.num_ranks).tolist()
        columns = zip(local[order].split_with_sizes(counts), sparse.values[order].split_with_sizes(counts), strict=True)
        return [Sparse(indices, values) for indices, values in columns]

    def in_whole(self, sparse: Sparse, part: int) -> Sparse:
        """Elements that the owner of `part` counts, at their places in the whole."""
        indices = sparse.indices
        places = ((indices >> _BLOCK_BITS) * self.num_ranks + part << _BLOCK_BITS) + (indices & _BLOCK - 1)
        return Sparse(places, sparse.values)


def _gather_counts(counts: list[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's counts, by rank."""
    mine = torch.tensor(counts, dtype=torch.int64).to(device)
    return [row.tolist() for row in all_gather(mine, group=group)]
