"""The collectives of dense codecs: scatter-reduce-all-gather, whole or by halves.

Every rank owns a shard. Each sends every other its part of that one's shard, encoded (all-to-all); each decodes what it
got, sums in fp32, and encodes the mean; all get all shards (all-gather). A rank sends 2 (P - 1) / P times the encoded
tensor, however many ranks there are, and all hold the same bits at the end.

Before the first message of its kind in a group, ranks compare what they are about to send. Later, a rank that receives
what it cannot decode says so in the all-gather, and every rank raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.tensors import all_gather, all_to_all
from torsh_distributed.compress.codecs.base import Averaged, Key
from torsh_distributed.compress.codecs.dense.quantiser import Quantiser
from torsh_distributed.compress.messages.envelope import Notice, Shape, open_message, seal
from torsh_distributed.errors import CompressionError, TensorShapeMismatch

_SECOND_LEG = 1 << 20  # beyond any rank: the mean must not be rounded by the numbers that rounded the gradient


def shard_bounds(num_elements: int, num_ranks: int, block: int) -> list[int]:
    """Where shards begin, and at last where they end: whole blocks, as evenly as those allow."""
    num_blocks = -(-num_elements // block)
    each, extra = divmod(num_blocks, num_ranks)
    starts = (min(num_elements, (rank * each + min(rank, extra)) * block) for rank in range(num_ranks + 1))
    return list(starts)


def average(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
    """The mean over the ranks of what their messages say, encoded once more; every rank of `group` calls it."""
    num_ranks, rank = group.size(), group.rank()
    key = key._replace(rank=rank)
    if num_ranks == 1:
        sent = codec.decode(codec.encode(x, key), x.numel(), key)
        return Averaged(sent.clone(), sent, 0)
    codec.require_agreement(x, group)
    bounds = shard_bounds(x.numel(), num_ranks, codec.block)
    scattered = _scatter(codec, x, bounds, group, key)
    room = codec.shape_of(bounds[1]).message_bytes  # the first shard is the largest
    gathered = _share_mean(codec, scattered, room, group, key)
    mean = torch.empty_like(x)
    _decode_all(codec, gathered, bounds, mean, rank)
    return Averaged(mean, scattered.sent, scattered.num_bytes + (num_ranks - 1) * room)


def reduce_scatter_mean(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key) -> Tensor:
    """This rank's shard of the mean over the ranks, sent encoded: the first half of `average`.

    `x` is cut evenly, so its length must be a multiple of the number of ranks. The mean is not encoded again. A message
    that cannot be decoded raises on the rank that got it; the others learn of it by the deadline of what comes next.
    """
    return _reduce_scatter(codec, x, group, key, needs_sent=False).mean


def reduce_scatter(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
    """As `reduce_scatter_mean`, with what this rank's messages say of all of `x`, which error feedback needs."""
    return _reduce_scatter(codec, x, group, key, needs_sent=True)


def _reduce_scatter(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key, *, needs_sent: bool) -> Averaged:
    num_ranks, rank = group.size(), group.rank()
    if x.numel() % num_ranks:
        raise TensorShapeMismatch(
            "the tensor does not split evenly over the ranks", numel=x.numel(), num_ranks=num_ranks
        )
    key = key._replace(rank=rank)
    codec.require_agreement(x, group)
    shard_numel = x.numel() // num_ranks
    bounds = [shard_numel * owner for owner in range(num_ranks + 1)]
    scattered = _scatter(codec, x, bounds, group, key, needs_sent=needs_sent)
    return Averaged(_reduce(codec, scattered, rank, key), scattered.sent, scattered.num_bytes)


def all_gather_encoded(codec: Quantiser, shard: Tensor, group: dist.ProcessGroup, key: Key) -> Tensor:
    """The shards of all ranks, one after the other, sent encoded; all shards are of one size.

    Every rank gets the same bits, its own shard included: that one too comes back as its message says it.
    """
    num_ranks, rank = group.size(), group.rank()
    key = key._replace(rank=rank)
    codec.require_agreement(shard, group)
    shape = codec.shape_of(shard.numel())
    message = _empty(shape.message_bytes, shard.device)
    codec.write(shard, shape.payload_of(message), seed=key.own)
    seal(message, shape)
    gathered = all_gather(message, group=group)
    whole = torch.empty(num_ranks * shard.numel(), dtype=torch.float32, device=shard.device)
    _decode_all(codec, gathered, [shard.numel() * owner for owner in range(num_ranks + 1)], whole, rank)
    return whole


class _Scattered(NamedTuple):
    """What came of the all-to-all."""

    received: Sequence[Tensor]
    """Messages for this rank's shard, by sender."""
    shape: Shape
    sent: Tensor
    num_bytes: int


def _scatter(
    codec: Quantiser, x: Tensor, bounds: Sequence[int], group: dist.ProcessGroup, key: Key, *, needs_sent: bool = True
) -> _Scattered:
    """Encode each shard and send it to its owner; `sent` is decoded while the messages travel."""
    rank = group.rank()
    shapes = [codec.shape_of(end - start) for start, end in itertools.pairwise(bounds)]
    sizes = [shape.message_bytes for shape in shapes]
    outbox = _empty(sum(sizes), x.device)
    messages = _cut(outbox, sizes)
    for shape, message, start in zip(shapes, messages, bounds, strict=False):
        part = x[start : start + shape.num_elements]
        codec.write(part, shape.payload_of(message), seed=key.own, offset=start)
        seal(message, shape)
    travelling = all_to_all(outbox, sizes, [sizes[rank]] * group.size(), async_op=True, group=group)
    sent = torch.empty_like(x) if needs_sent else x.new_empty(0)
    if needs_sent:
        for shape, message, start in zip(shapes, messages, bounds, strict=False):
            codec.read(shape.payload_of(message), sent[start : start + shape.num_elements])
    received = _cut(travelling.wait(), [sizes[rank]] * group.size())
    return _Scattered(received, shapes[rank], sent, sum(sizes) - sizes[rank])


def _reduce(codec: Quantiser, scattered: _Scattered, rank: int, key: Key) -> Tensor:
    """The mean of the messages for this rank's shard; raises CompressionError, with `from_rank`, on a bad one."""
    payloads = []
    for sender, message in enumerate(scattered.received):
        with _blaming(sender, rank):
            payloads.append(open_message(message, scattered.shape).payload)
    mean, damaged = codec.combine(payloads, scattered.shape.num_elements, seed=key.shared)
    if damaged:
        with _blaming(damaged[0], rank):
            raise _unsound(codec)
    return mean


def _share_mean(codec: Quantiser, scattered: _Scattered, room: int, group: dist.ProcessGroup, key: Key) -> list[Tensor]:
    """Reduce this rank's shard, encode it, and gather those of all ranks; they are `room` bytes long at most."""
    rank, shape = group.rank(), scattered.shape
    message = _empty(room, scattered.sent.device)
    problem: CompressionError | None = None
    try:
        mean = _reduce(codec, scattered, rank, key)
    except CompressionError as error:
        # The others wait in the all-gather: they learn there what happened, and raise too.
        problem = error
        subject = int(error.context["from_rank"])
        seal(message[: shape.message_bytes].zero_(), shape, notice=Notice.REFUSED, subject=subject)
    else:
        _encode_mean(codec, mean, message[: shape.message_bytes], shape, key)
    gathered = all_gather(message, group=group)
    if problem is not None:
        raise problem
    return gathered


def _encode_mean(codec: Quantiser, mean: Tensor, message: Tensor, shape: Shape, key: Key) -> None:
    """Put the shard's mean into its message, with what last time's lost where the codec keeps that."""
    residual = codec.residual(key.stream, mean) if codec.server_feedback else None
    if residual is not None:
        mean += residual
    payload = shape.payload_of(message)
    codec.write(mean, payload, seed=key._replace(rank=key.rank + _SECOND_LEG).own)
    if codec.server_feedback:
        codec.read(payload, mean, weight=-1.0, adds=True)
        codec.keep_residual(key.stream, mean)
    seal(message, shape)


def _decode_all(codec: Quantiser, messages: Sequence[Tensor], bounds: Sequence[int], out: Tensor, rank: int) -> None:
    """Decode the messages of all ranks, each into its shard of `out`."""
    for owner, (start, end) in enumerate(itertools.pairwise(bounds)):
        shape = codec.shape_of(end - start)
        with _blaming(owner, rank):
            opened = open_message(messages[owner][: shape.message_bytes], shape)
            if opened.notice is Notice.REFUSED:
                raise CompressionError(
                    f"rank {owner} could not decode the {codec.name} message of rank {opened.subject}",
                    hint=f"look for a gradient that is not finite on rank {opened.subject}; rank {owner} says more",
                )
            if not codec.read(opened.payload, out[start:end]):
                raise _unsound(codec)


@contextmanager
def _blaming(sender: int, rank: int) -> Iterator[None]:
    """Add to an error whose message it was, and who saw it; ranks are those of the group."""
    try:
        yield
    except CompressionError as error:
        error.context.update(from_rank=sender, rank=rank)
        raise


def _unsound(codec: Quantiser) -> CompressionError:
    return CompressionError(
        f"a {codec.name} message cannot have been written by its encoder",
        hint="look for a gradient that is not finite on that rank, then for faulty memory",
    )


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _cut(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = itertools.accumulate(sizes)
    return [buffer[end - size : end] for size, end in zip(sizes, ends, strict=True)]
