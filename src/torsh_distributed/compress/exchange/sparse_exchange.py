"""The mean of sparse messages over the ranks of a group.

Up to three ranks send each other all they have: (P - 1)·S bytes a rank, for messages of S bytes, in one round. With
more ranks that would grow with the world, so elements are divided among the ranks: each sums those it owns and sends
back the largest, as many in all as one rank sent. That takes 2·S·(P - 1)/P bytes a rank, whatever P is.

What an owner leaves out of the sum is counted in its own `sent`: at every element the ranks' `sent` add up to P times
the mean, so error feedback loses nothing. If a rank receives a message that it cannot decode, every rank raises at the
end of that average (`message_agreement`).
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
from torsh_distributed.compress.exchange.message_agreement import DamageReport
from torsh_distributed.compress.messages.compressed_gradient import MessageSpec, open_message, seal
from torsh_distributed.compress.messages.indices import nonzero
from torsh_distributed.compress.messages.sparse import (
    Sparse,
    SparseVector,
    decode_sparse,
    encode_sparse,
    most_sparse_bytes,
    sparse_bytes,
)

_BLOCK_BITS = 6
_BLOCK = 1 << _BLOCK_BITS
_MOST_FOR_ALL_GATHER = 3
_COUNT_BYTES = 8


class SparseFormat(NamedTuple):
    """How a codec writes its sparse messages: the same on all ranks."""

    signature: int
    dtype: torch.dtype

    def spec(self, num_elements: int, count: int) -> MessageSpec:
        """A message with exactly `count` elements."""
        return MessageSpec(self.signature, num_elements, sparse_bytes(num_elements, count, self.dtype))

    def padded_spec(self, num_elements: int, most: int) -> MessageSpec:
        """A message with at most `most` elements, padded with zeros."""
        return MessageSpec(self.signature, num_elements, most_sparse_bytes(num_elements, most, self.dtype))

    def write(self, sparse: Sparse, spec: MessageSpec) -> Tensor:
        """The message in its envelope."""
        message = torch.zeros(spec.message_bytes, dtype=torch.uint8, device=sparse.values.device)
        payload = encode_sparse(sparse, spec.num_elements, self.dtype)
        spec.payload_of(message)[: payload.numel()] = payload
        seal(message, spec)
        return message

    def read(self, payload: Tensor, num_elements: int) -> Sparse:
        """Decode a payload; padding may follow it."""
        return decode_sparse(payload, num_elements, self.dtype, is_padded=True)


def average_sparse(
    own: Sparse, num_elements: int, group: dist.ProcessGroup, form: SparseFormat, *, is_fixed: bool
) -> Averaged:
    """Average what the ranks selected; every rank calls it.

    `is_fixed` says that all ranks selected equally many, so counts need not travel.
    """
    if group.size() == 1:
        decoded = decode_sparse(encode_sparse(own, num_elements, form.dtype), num_elements, form.dtype)
        alone = SparseVector((decoded,), num_elements)
        return Averaged(alone, alone, 0)
    if group.size() <= _MOST_FOR_ALL_GATHER:
        return _by_all_gather(own, num_elements, group, form, is_fixed=is_fixed)
    return _by_owners(own, num_elements, group, form)


def _by_all_gather(
    own: Sparse, num_elements: int, group: dist.ProcessGroup, form: SparseFormat, *, is_fixed: bool
) -> Averaged:
    """Every rank gets every message and adds them in the order of ranks."""
    num_ranks, rank = group.size(), group.rank()
    most, count_bytes = own.indices.numel(), 0
    spec = form.spec(num_elements, most)
    if not is_fixed:
        most = max(count for (count,) in _gather_counts([most], group, own.values.device))
        spec = form.padded_spec(num_elements, most)
        count_bytes = _COUNT_BYTES
    gathered = all_gather(form.write(own, spec), group=group)
    decoded = _decode_shared(gathered, [spec] * num_ranks, DamageReport(group), form)
    mean = SparseVector(tuple(decoded), num_elements).scaled(1 / num_ranks)
    sent = SparseVector((decoded[rank],), num_elements)
    return Averaged(mean, sent, (num_ranks - 1) * (spec.message_bytes + count_bytes))


def _decode_shared(
    messages: Sequence[Tensor], specs: Sequence[MessageSpec], report: DamageReport, form: SparseFormat
) -> list[Sparse]:
    """Decode messages that all ranks received; raises on every rank if any found damage."""
    payloads = []
    for sender, (message, spec) in enumerate(zip(messages, specs, strict=True)):
        with report.reading(sender):
            payloads.append(open_message(message[: spec.message_bytes], spec))
    report.raise_together(messages[0].device)
    # From here on every rank has the same bytes: what one cannot decode, none can.
    return [form.read(payload, spec.num_elements) for payload, spec in zip(payloads, specs, strict=True)]


def _by_owners(own: Sparse, num_elements: int, group: dist.ProcessGroup, form: SparseFormat) -> Averaged:
    """Every rank sums the elements it owns and sends the largest sums to all."""
    num_ranks, rank = group.size(), group.rank()
    owners = BlockCyclic(num_elements, num_ranks)
    shares = owners.split(own)
    counts = _gather_counts([share.indices.numel() for share in shares], group, own.values.device)
    messages = [
        form.write(share, form.spec(owners.numel(owner), share.indices.numel())) for owner, share in enumerate(shares)
    ]
    specs = [form.spec(owners.numel(rank), row[rank]) for row in counts]
    sizes = [message.numel() for message in messages]
    received = all_to_all_single(torch.cat(messages), sizes, [spec.message_bytes for spec in specs], group=group)

    sent = []
    for owner, (share, message) in enumerate(zip(shares, messages, strict=True)):
        payload = form.spec(owners.numel(owner), share.indices.numel()).payload_of(message)
        sent.append(owners.to_global(form.read(payload, owners.numel(owner)), owner))

    # As many as one rank sent on average, divided evenly: blocks are interleaved, so each owner has its share of them.
    budget = -(-sum(map(sum, counts)) // num_ranks**2)
    sum_specs = [form.padded_spec(owners.numel(owner), budget) for owner in range(num_ranks)]
    report = DamageReport(group)
    sums = _sum_up(received, specs, form, report)
    chosen = largest(sums.values, budget)
    kept = Sparse(sums.indices.index_select(0, chosen), sums.values.index_select(0, chosen))
    message = form.write(kept, sum_specs[rank])
    size = max(spec.message_bytes for spec in sum_specs)
    gathered = all_gather(torch.nn.functional.pad(message, (0, size - message.numel())), group=group)
    decoded = _decode_shared(gathered, sum_specs, report, form)
    found = tuple(owners.to_global(sparse, owner) for owner, sparse in enumerate(decoded))
    sent += [owners.to_global(Sparse(sums.indices, -sums.values), rank), found[rank]]
    return Averaged(
        SparseVector(found, num_elements).scaled(1 / num_ranks),
        SparseVector(tuple(sent), num_elements),
        sum(sizes) - sizes[rank] + (num_ranks - 1) * (size + _COUNT_BYTES * num_ranks),
    )


def _sum_up(received: Tensor, specs: Sequence[MessageSpec], form: SparseFormat, report: DamageReport) -> Sparse:
    """The sum of the messages for this rank, in the order of ranks, at every element that one of them names.

    Damaged messages are reported and left out: the sum is then invalid, and all ranks raise after they gathered it.
    """
    num_elements = specs[0].num_elements
    total = torch.zeros(num_elements, device=received.device)
    is_named = torch.zeros(num_elements, dtype=torch.bool, device=received.device)
    messages = received.split_with_sizes([spec.message_bytes for spec in specs])
    for sender, (message, spec) in enumerate(zip(messages, specs, strict=True)):
        with report.reading(sender):
            found = form.read(open_message(message, spec), num_elements)
            total.index_add_(0, found.indices, found.values)
            is_named.index_fill_(0, found.indices, True)
    indices = nonzero(is_named)
    return Sparse(indices, total.index_select(0, indices))


class BlockCyclic(NamedTuple):
    """Elements owned by the ranks in turn, in small blocks.

    Why not a range each: large gradients come in runs, such as a layer or a row, and would belong to few ranks.
    """

    num_elements: int
    num_ranks: int

    def numel(self, owner: int) -> int:
        """How many elements that rank owns."""
        rounds, rest = divmod(self.num_elements, _BLOCK * self.num_ranks)
        return rounds * _BLOCK + min(max(rest - owner * _BLOCK, 0), _BLOCK)

    def split(self, sparse: Sparse) -> list[Sparse]:
        """Elements by their owner; indices count the owner's elements, and are increasing."""
        blocks = sparse.indices >> _BLOCK_BITS
        owners = blocks % self.num_ranks
        order = owners.argsort(stable=True)
        local = (blocks // self.num_ranks << _BLOCK_BITS) + (sparse.indices & _BLOCK - 1)
        counts = owners.bincount(minlength=self.num_ranks).tolist()
        columns = zip(local[order].split_with_sizes(counts), sparse.values[order].split_with_sizes(counts), strict=True)
        return [Sparse(indices, values) for indices, values in columns]

    def to_global(self, sparse: Sparse, owner: int) -> Sparse:
        """Elements indexed among those of `owner`, with their indices in the whole."""
        indices = sparse.indices
        places = ((indices >> _BLOCK_BITS) * self.num_ranks + owner << _BLOCK_BITS) + (indices & _BLOCK - 1)
        return Sparse(places, sparse.values)


def _gather_counts(counts: list[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's counts, by rank."""
    mine = torch.tensor(counts, dtype=torch.int64).to(device)
    return [row.tolist() for row in all_gather(mine, group=group)]
