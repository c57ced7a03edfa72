"""The mean of sparse messages over the ranks of a group.

Up to three ranks send each other all they have: (P - 1)·S bytes a rank, for messages of S bytes, in one round. From
four on that would grow with the world, so elements are divided among the ranks: each sums up those of its part and
sends back the largest, as many in all as one rank sent. That takes 2·S·(P - 1)/P bytes a rank, whatever P is.

What the owner of a part leaves out of the sum is accounted for in its own `sent`: at every element the ranks' `sent`
add up to P times the mean, so that error feedback loses nothing of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives import all_gather, all_to_all
from torsh_distributed.compress.codec import Averaged
from torsh_distributed.compress.gaps import nonzero
from torsh_distributed.compress.selection import largest
from torsh_distributed.compress.sparse import (
    Sparse,
    decode_sparse,
    densify,
    encode_sparse,
    most_sparse_bytes,
    sparse_bytes,
)

_BLOCK = 64
_MOST_FOR_ALL_GATHER = 3
_COUNT_BYTES = 8


def average_sparse(
    own: Sparse, num_elements: int, group: dist.ProcessGroup, *, dtype: torch.dtype, is_fixed: bool
) -> Averaged:
    """Average what the ranks selected; every rank calls it.

    `is_fixed` says that all ranks selected equally many, so that nobody needs to be told how many.
    """
    if group.size() <= _MOST_FOR_ALL_GATHER:
        return _by_all_gather(own, num_elements, group, dtype, is_fixed=is_fixed)
    return _by_parts(own, num_elements, group, dtype)


def _by_all_gather(
    own: Sparse, num_elements: int, group: dist.ProcessGroup, dtype: torch.dtype, *, is_fixed: bool
) -> Averaged:
    """Every rank gets every message and adds them up in the order of ranks."""
    num_ranks = group.size()
    message = encode_sparse(own, num_elements, dtype)
    sent = densify(decode_sparse(message, num_elements, dtype), num_elements)
    if num_ranks == 1:
        return Averaged(sent, sent.clone(), 0)
    size, told_bytes = message.numel(), 0
    if not is_fixed:
        counts = _gather_counts([own.indices.numel()], group, message.device)
        size = max(sparse_bytes(num_elements, count, dtype) for (count,) in counts)
        told_bytes = _COUNT_BYTES
    total = torch.zeros_like(sent)
    for piece in all_gather(_padded(message, size), group=group):
        found = decode_sparse(piece, num_elements, dtype, is_padded=True)
        total.index_add_(0, found.indices, found.values)
    return Averaged(total.div_(num_ranks), sent, (num_ranks - 1) * (size + told_bytes))


def _by_parts(own: Sparse, num_elements: int, group: dist.ProcessGroup, dtype: torch.dtype) -> Averaged:
    """Every rank adds up its part of the elements and gives the largest sums to all."""
    num_ranks, rank = group.size(), group.rank()
    parts = Parts(num_elements, num_ranks)
    pieces = parts.split(own)
    messages = [encode_sparse(piece, parts.numel(part), dtype) for part, piece in enumerate(pieces)]
    counts = _gather_counts([piece.indices.numel() for piece in pieces], group, own.values.device)
    received = all_to_all(
        torch.cat(messages),
        [message.numel() for message in messages],
        [sparse_bytes(parts.numel(rank), row[rank], dtype) for row in counts],
        group=group,
    )
    sent = own.values.new_zeros(num_elements)
    for part, message in enumerate(messages):
        said = decode_sparse(message, parts.numel(part), dtype)
        sent[parts.globals(said.indices, part)] = said.values

    sums = _sum_up(received, [row[rank] for row in counts], parts.numel(rank), dtype)
    # As many as one rank sent on average, divided evenly: the parts are interleaved, so each has its share of them.
    budget = -(-sum(map(sum, counts)) // num_ranks**2)
    chosen = largest(sums.values, budget)
    kept = encode_sparse(Sparse(sums.indices[chosen], sums.values[chosen]), parts.numel(rank), dtype)
    sent[parts.globals(sums.indices, rank)] -= sums.values

    size = max(most_sparse_bytes(parts.numel(part), budget, dtype) for part in range(num_ranks))
    mean = torch.zeros_like(sent)
    for part, piece in enumerate(all_gather(_padded(kept, size), group=group)):
        found = decode_sparse(piece, parts.numel(part), dtype, is_padded=True)
        places = parts.globals(found.indices, part)
        mean[places] = found.values / num_ranks
        if part == rank:
            sent[places] += found.values
    to_owners = sum(message.numel() for part, message in enumerate(messages) if part != rank)
    return Averaged(mean, sent, to_owners + (num_ranks - 1) * (size + _COUNT_BYTES * num_ranks))


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
        blocks = sparse.indices // _BLOCK
        owners = blocks % self.num_ranks
        order = owners.argsort(stable=True)
        local = blocks // self.num_ranks * _BLOCK + sparse.indices % _BLOCK
        counts = owners.bincount(minlength=self.num_ranks).tolist()
        columns = zip(local[order].split_with_sizes(counts), sparse.values[order].split_with_sizes(counts), strict=True)
        return [Sparse(indices, values) for indices, values in columns]

    def globals(self, indices: Tensor, part: int) -> Tensor:
        """The places in the whole of elements that the owner of `part` counts."""
        return (indices // _BLOCK * self.num_ranks + part) * _BLOCK + indices % _BLOCK


def _sum_up(received: Tensor, counts: list[int], num_elements: int, dtype: torch.dtype) -> Sparse:
    """The sum of several messages, one after the other, at every element that one of them names."""
    total = torch.zeros(num_elements, device=received.device)
    is_named = torch.zeros(num_elements, dtype=torch.bool, device=received.device)
    for message in received.split_with_sizes([sparse_bytes(num_elements, count, dtype) for count in counts]):
        found = decode_sparse(message, num_elements, dtype)
        total.index_add_(0, found.indices, found.values)
        is_named[found.indices] = True
    indices = nonzero(is_named)
    return Sparse(indices, total[indices])


def _gather_counts(counts: list[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's counts, by rank."""
    mine = torch.tensor(counts, dtype=torch.int64).to(device)
    return [row.tolist() for row in all_gather(mine, group=group)]


def _padded(message: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(message, (0, size - message.numel()))
