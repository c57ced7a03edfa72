"""The collectives of dense codecs: scatter-reduce-all-gather, whole or by halves.

Every rank owns a shard. Each sends every other rank its part of that one's shard, encoded (all-to-all); each decodes
what it received, sums in fp32, and encodes the mean; all get all shards (all-gather). A rank sends 2 (P - 1) / P times
the encoded tensor, however many ranks there are, and all hold the same bits at the end.

Before the first message of its kind in a group, ranks compare what they are about to send. If a rank later receives a
message that it cannot decode, every rank raises at the end of that exchange (`message_agreement`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import all_gather, all_to_all_single
from torsh_distributed.compress.codecs.base import Averaged, Key
from torsh_distributed.compress.codecs.dense.quantiser import Quantiser
from torsh_distributed.compress.exchange.message_agreement import DamageReport
from torsh_distributed.compress.messages.compressed_gradient import MessageSpec, open_message, seal
from torsh_distributed.errors import CompressionError, TensorShapeMismatch

_SECOND_LEG = 1 << 20  # beyond any rank: the mean must not be rounded by the numbers that rounded the gradient


def shard_bounds(num_elements: int, num_ranks: int, block: int) -> list[int]:
    """Where each shard starts, and where the last one ends: whole blocks, as evenly as those allow."""
    num_blocks = -(-num_elements // block)
    each, extra = divmod(num_blocks, num_ranks)
    starts = (min(num_elements, (rank * each + min(rank, extra)) * block) for rank in range(num_ranks + 1))
    return list(starts)


def average(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
    """The mean over the ranks of what their messages decode to, encoded once more; every rank of `group` calls it."""
    num_ranks, rank = group.size(), group.rank()
    key = key._replace(rank=rank)
    if num_ranks == 1:
        sent = codec.decode(codec.encode(x, key), x.numel(), key)
        return Averaged(sent.clone(), sent, 0)
    codec.require_agreement(x, group)
    report = DamageReport(group)
    bounds = shard_bounds(x.numel(), num_ranks, codec.block)
    scattered = _scatter(codec, x, bounds, group, key)
    own = _reduce(codec, scattered, report, key)
    room = codec.message_spec(bounds[1]).message_bytes  # the first shard is the largest
    message = _bytes(room, x.device)
    own_message = message[: scattered.spec.message_bytes]
    if report.error is None:
        _encode_mean(codec, own, own_message, scattered.spec, key)
    else:  # an intact message of zeros, so the others report nothing of their own and learn what was found here
        seal(own_message.zero_(), scattered.spec)
    gathered = all_gather(message, group=group)
    mean = torch.empty_like(x)
    _decode_all(codec, gathered, bounds, mean, report)
    return Averaged(mean, scattered.sent, scattered.num_bytes + (num_ranks - 1) * room)


def reduce_scatter_mean(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key) -> Tensor:
    """This rank's shard of the mean over the ranks, sent encoded: the first half of `average`.

    `x` is cut evenly, so its length must be a multiple of the number of ranks. The mean is not encoded again.
    """
    return _reduce_scatter(codec, x, group, key, needs_sent=False).mean


def reduce_scatter(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
    """As `reduce_scatter_mean`, with what this rank's messages decode to for all of `x`: error feedback needs it."""
    return _reduce_scatter(codec, x, group, key, needs_sent=True)


def _reduce_scatter(codec: Quantiser, x: Tensor, group: dist.ProcessGroup, key: Key, *, needs_sent: bool) -> Averaged:
    num_ranks, rank = group.size(), group.rank()
    if x.numel() % num_ranks:
        raise TensorShapeMismatch(
            "the tensor does not split evenly over the ranks", numel=x.numel(), num_ranks=num_ranks
        )
    key = key._replace(rank=rank)
    codec.require_agreement(x, group)
    report = DamageReport(group)
    shard_numel = x.numel() // num_ranks
    bounds = [shard_numel * owner for owner in range(num_ranks + 1)]
    scattered = _scatter(codec, x, bounds, group, key, needs_sent=needs_sent)
    mean = _reduce(codec, scattered, report, key)
    report.raise_together(x.device)
    return Averaged(mean, scattered.sent, scattered.num_bytes)


def all_gather_encoded(codec: Quantiser, shard: Tensor, group: dist.ProcessGroup, key: Key) -> Tensor:
    """The shards of all ranks, one after the other, sent encoded; all shards are of one size.

    Every rank gets the same bits, its own shard included, which is decoded from its message as well.
    """
    num_ranks, rank = group.size(), group.rank()
    key = key._replace(rank=rank)
    codec.require_agreement(shard, group)
    spec = codec.message_spec(shard.numel())
    message = _bytes(spec.message_bytes, shard.device)
    codec.write(shard, spec.payload_of(message), seed=key.own)
    seal(message, spec)
    gathered = all_gather(message, group=group)
    whole = torch.empty(num_ranks * shard.numel(), dtype=torch.float32, device=shard.device)
    bounds = [shard.numel() * owner for owner in range(num_ranks + 1)]
    _decode_all(codec, gathered, bounds, whole, DamageReport(group))
    return whole


class _Scattered(NamedTuple):
    """The result of the all-to-all."""

    received: Sequence[Tensor]
    """Messages for this rank's shard, by sender."""
    spec: MessageSpec
    sent: Tensor
    num_bytes: int


def _scatter(
    codec: Quantiser, x: Tensor, bounds: Sequence[int], group: dist.ProcessGroup, key: Key, *, needs_sent: bool = True
) -> _Scattered:
    """Encode each shard and send it to its owner; `sent` is decoded while the messages travel."""
    rank = group.rank()
    specs = [codec.message_spec(end - start) for start, end in itertools.pairwise(bounds)]
    sizes = [spec.message_bytes for spec in specs]
    outbox = _bytes(sum(sizes), x.device)
    messages = _cut(outbox, sizes)
    for spec, message, start in zip(specs, messages, bounds, strict=False):
        part = x[start : start + spec.num_elements]
        codec.write(part, spec.payload_of(message), seed=key.own, offset=start)
        seal(message, spec)
    travelling = all_to_all_single(outbox, sizes, [sizes[rank]] * group.size(), async_op=True, group=group)
    sent = torch.empty_like(x) if needs_sent else x.new_empty(0)
    if needs_sent:
        for spec, message, start in zip(specs, messages, bounds, strict=False):
            codec.read(spec.payload_of(message), sent[start : start + spec.num_elements])
    received = _cut(travelling.wait(), [sizes[rank]] * group.size())
    return _Scattered(received, specs[rank], sent, sum(sizes) - sizes[rank])


def _reduce(codec: Quantiser, scattered: _Scattered, report: DamageReport, key: Key) -> Tensor:
    """The mean of the messages for this rank's shard; invalid if the report has an error afterwards."""
    payloads = []
    for sender, message in enumerate(scattered.received):
        with report.reading(sender):
            payloads.append(open_message(message, scattered.spec))
    if report.error is not None:
        return scattered.sent.new_empty(0)
    mean, damaged = codec.combine(payloads, scattered.spec.num_elements, seed=key.shared)
    for sender in damaged:
        with report.reading(sender):
            raise _unsound(codec, from_rank=sender)
    return mean


def _encode_mean(codec: Quantiser, mean: Tensor, message: Tensor, spec: MessageSpec, key: Key) -> None:
    """Encode the shard's mean into its message, with what was lost last time where the codec keeps that."""
    residual = codec.residual(key.stream, mean) if codec.server_feedback else None
    if residual is not None:
        mean += residual
    payload = spec.payload_of(message)
    codec.write(mean, payload, seed=key._replace(rank=key.rank + _SECOND_LEG).own)
    if codec.server_feedback:
        codec.read(payload, mean, weight=-1.0, adds=True)
        codec.keep_residual(key.stream, mean)
    seal(message, spec)


def _decode_all(
    codec: Quantiser, messages: Sequence[Tensor], bounds: Sequence[int], out: Tensor, report: DamageReport
) -> None:
    """Decode the messages of all ranks, each into its shard of `out`; raises on every rank if any found damage."""
    payloads = []
    for owner, (start, end) in enumerate(itertools.pairwise(bounds)):
        spec = codec.message_spec(end - start)
        with report.reading(owner):
            payloads.append(open_message(messages[owner][: spec.message_bytes], spec))
    report.raise_together(out.device)
    # From here on every rank has the same bytes: what one cannot decode, none can.
    for owner, (payload, start, end) in enumerate(zip(payloads, bounds, bounds[1:], strict=False)):
        if not codec.read(payload, out[start:end]):
            raise _unsound(codec, from_rank=owner)


def _unsound(codec: Quantiser, *, from_rank: int) -> CompressionError:
    return CompressionError(
        f"a {codec.name} message cannot have been written by its encoder",
        hint="look for a gradient that is not finite on that rank, then for faulty memory",
        from_rank=from_rank,
    )


def _bytes(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _cut(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = itertools.accumulate(sizes)
    return [buffer[end - size : end] for size, end in zip(sizes, ends, strict=True)]
