"""Ring all-reduce: every rank sends to the next and receives from the previous."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, Channel, MeasuredCosts
from torsh_distributed.comm.folding import finish_fold, fold_into
from torsh_distributed.comm.reduce_op import ReduceOp


@dataclass(frozen=True)
class Ring(Algorithm):
    """Shards travel around a ring twice: once being folded, once whole.

    Why: every link carries 2(p-1)/p of the buffer, the minimum, and only neighbours talk. Costs 2(p-1)
    latencies, so it is for large buffers: 2(p-1)α + 2(p-1)/p·nβ.
    """

    name = "ring"

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        ring_all_reduce(flat, op, channel, num_pieces=1)

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        size = costs.num_ranks
        shard_bytes = num_bytes / size
        return (size - 1) * (2 * costs.flat.exchange_s(shard_bytes) + shard_bytes * costs.fold_byte_s)


def ring_all_reduce(flat: Tensor, op: ReduceOp, channel: Channel, *, num_pieces: int) -> None:
    """The ring, each shard cut into pieces: while one is folded the others travel.

    Step s of the first lap sends shard position-s, and folds what arrives into shard position-s-1; a rank then owns
    shard position+1, and the second lap passes whole shards on in the same way.
    """
    size, here = channel.size, channel.position
    after, before = (here + 1) % size, (here - 1) % size
    shards = [shard.tensor_split(num_pieces) for shard in flat.tensor_split(size)]
    largest = max(piece.numel() for shard in shards for piece in shard)
    buffers = [flat.new_empty(largest) for _ in range(num_pieces)]
    sent = [channel.send(piece, after) for piece in shards[here]] if size > 1 else []
    for step in range(size - 1):
        targets = shards[(here - step - 1) % size]
        arrivals = [buffer[: piece.numel()] for buffer, piece in zip(buffers, targets, strict=True)]
        received = [channel.receive(arrival, before) for arrival in arrivals]
        for piece, arrival, transfer in zip(targets, arrivals, received, strict=True):
            channel.wait(transfer)
            fold_into(piece, arrival, op)
            if step == size - 2:
                finish_fold(piece, op, size)
            sent.append(channel.send(piece, after))  # the next step's message, or the first of the second lap
    # The second lap overwrites what the first has sent; the messages just started belong to the second.
    channel.wait(*sent[:-num_pieces])
    sent = sent[-num_pieces:]
    for step in range(size - 1):
        targets = shards[(here - step) % size]
        received = [channel.receive(piece, before) for piece in targets]
        for piece, transfer in zip(targets, received, strict=True):
            channel.wait(transfer)
            if step < size - 2:
                sent.append(channel.send(piece, after))
    channel.wait(*sent)


@dataclass(frozen=True)
class DoubleBuffered(Algorithm):
    """The ring with two buffers, filled and folded in turn.

    Why: if folding is as slow as the link, the plain ring leaves the link idle while it folds. Costs twice as many
    messages: 2(p-1)(α+μ) + 2(p-1)/p·max(nβ, fold), so it is for large buffers on fast links.
    """

    name = "double_buffered"

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        ring_all_reduce(flat, op, channel, num_pieces=2)

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        size = costs.num_ranks
        shard_bytes = num_bytes / size
        exchange_s = costs.flat.exchange_s(shard_bytes, num_messages=2)
        # The last half of a shard is always folded while nothing travels.
        exposed_s = max(shard_bytes / 2 * costs.fold_byte_s, shard_bytes * costs.fold_byte_s - exchange_s)
        return (size - 1) * (2 * exchange_s + exposed_s)
