"""The mean over ranks of which each keeps a shard, sent through any codec whose messages stand by themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.compress.averaging import exchange
from torsh_distributed.compress.codecs.base import Averaged, Codec, Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.errors import TensorShapeMismatch


def scattered_mean(codec: Codec, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
    """This rank's shard of the mean of `x`, cut evenly over the ranks, and what its messages say of all of `x`.

    Every rank of the group calls it with as many elements. Each encodes a message for every owner of a shard, and
    decodes those for its own; the mean is not encoded again.
    """
    num_ranks, rank = group.size(), group.rank()
    if isinstance(codec, DenseCodec):
        return exchange.reduce_scatter(codec, x, group, key)
    if x.numel() % num_ranks:
        raise TensorShapeMismatch(
            "the tensor does not split evenly over the ranks", numel=x.numel(), num_ranks=num_ranks
        )
    shards = x.view(num_ranks, -1)
    numel = shards.shape[1]
    mine = key._replace(rank=rank)
    payloads = [codec.encode(shard, mine) for shard in shards]
    dtype, sizes = payloads[0].dtype, [payload.nbytes for payload in payloads]
    received = _exchanged(payloads, codec.payload_bytes(numel), group)
    sent = torch.cat([codec.decode(payload, numel, mine) for payload in payloads])
    mean = torch.zeros(numel, dtype=torch.float32, device=x.device)
    for sender, message in enumerate(received):
        mean += codec.decode(message.view(dtype), numel, key._replace(rank=sender))
    return Averaged(mean.div_(num_ranks), sent, sum(sizes) - sizes[rank])


def _exchanged(payloads: list[Tensor], fixed_bytes: int | None, group: dist.ProcessGroup) -> list[Tensor]:
    """The messages for this rank, by sender, as bytes; sizes travel first where the values decide them."""
    outbox = torch.cat([payload.contiguous().view(torch.uint8) for payload in payloads])
    out_bytes = [payload.nbytes for payload in payloads]
    in_bytes = out_bytes
    if fixed_bytes is None:
        sizes = torch.tensor(out_bytes, dtype=torch.int64, device=outbox.device)
        in_bytes = [int(size) for size in all_to_all_single(sizes, group=group)]
    inbox = all_to_all_single(outbox, out_bytes, in_bytes, group=group)
    # A copy of each: a view as another dtype needs to begin at a multiple of its size.
    return [message.clone() for message in torch.split(inbox, in_bytes)]
