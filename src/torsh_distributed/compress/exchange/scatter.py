"""The mean over ranks of which each keeps a shard, sent through any codec whose messages decode by themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.compress.codecs.base import Averaged, Codec, Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.exchange.dense_exchange import reduce_scatter as dense_reduce_scatter
from torsh_distributed.compress.exchange.message_agreement import DamageReport, signature_of
from torsh_distributed.compress.messages.compressed_gradient import MessageSpec, open_message, seal
from torsh_distributed.errors import TensorShapeMismatch


def scattered_mean(codec: Codec, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
    """This rank's shard of the mean of `x`, cut evenly over the ranks, and what its messages decode to for all of `x`.

    Every rank of the group calls it with as many elements. Each encodes a message for every owner of a shard, and
    decodes those for its own; the mean is not encoded again. If a rank cannot decode a message, every rank raises.
    """
    num_ranks, rank = group.size(), group.rank()
    if isinstance(codec, DenseCodec):
        return dense_reduce_scatter(codec, x, group, key)
    if x.numel() % num_ranks:
        raise TensorShapeMismatch(
            "the tensor does not split evenly over the ranks", numel=x.numel(), num_ranks=num_ranks
        )
    shards = x.view(num_ranks, -1)
    numel = shards.shape[1]
    mine = key._replace(rank=rank)
    payloads = [codec.encode(shard, mine) for shard in shards]
    dtype, sizes = payloads[0].dtype, [payload.nbytes for payload in payloads]
    report = DamageReport(group)
    received = _exchanged(codec, payloads, numel, group, report)
    sent = torch.cat([codec.decode(payload, numel, mine) for payload in payloads])
    mean = torch.zeros(numel, dtype=torch.float32, device=x.device)
    for sender, message in received.items():
        with report.reading(sender):
            mean += codec.decode(message.view(dtype), numel, key._replace(rank=sender))
    report.raise_together(x.device)
    return Averaged(mean.div_(num_ranks), sent, sum(sizes) - sizes[rank])


def _exchanged(
    codec: Codec, payloads: list[Tensor], numel: int, group: dist.ProcessGroup, report: DamageReport
) -> dict[int, Tensor]:
    """The intact payloads for this rank, by sender, as bytes; their sizes travel first if the values decide them."""
    out_bytes = [payload.nbytes for payload in payloads]
    in_bytes = out_bytes
    if codec.payload_bytes(numel) is None:
        sizes = torch.tensor(out_bytes, dtype=torch.int64, device=payloads[0].device)
        in_bytes = [int(size) for size in all_to_all_single(sizes, group=group)]
    signature = signature_of(codec.name)
    out_specs, in_specs = (
        [MessageSpec(signature, numel, num_bytes) for num_bytes in each] for each in (out_bytes, in_bytes)
    )
    out_sizes, in_sizes = ([spec.message_bytes for spec in specs] for specs in (out_specs, in_specs))
    outbox = torch.empty(sum(out_sizes), dtype=torch.uint8, device=payloads[0].device)
    for payload, spec, message in zip(payloads, out_specs, torch.split(outbox, out_sizes), strict=True):
        spec.payload_of(message).copy_(payload.contiguous().view(torch.uint8))
        seal(message, spec)
    inbox = all_to_all_single(outbox, out_sizes, in_sizes, group=group)
    found = {}
    for sender, (spec, message) in enumerate(zip(in_specs, torch.split(inbox, in_sizes), strict=True)):
        with report.reading(sender):
            # A copy: a view as another dtype must begin at a multiple of its size.
            found[sender] = open_message(message, spec).clone()
    return found
