"""Pipelined all-reduce: chunks move up a chain of ranks while finished ones move back down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, Channel, MeasuredCosts, Transfer
from torsh_distributed.comm.folding import finish_fold, fold_into
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import InvalidArgument

_CHUNK_BYTES = 512 * 1024
_MAX_CHUNKS = 64


def chain_moves(position: int, size: int, num_chunks: int) -> Iterator[tuple[Literal["up", "down"], int]]:
    """What a rank of the chain does, in order: fold chunk c on its way up, pass chunk c on its way down.

    Chunk c is folded at `position` at tick c + position and comes back through it at tick c + 2(size - 1) - position;
    each rank makes its moves in the order of ticks, so ranks never wait in a circle.
    """
    lag = 2 * (size - 1 - position)
    for tick in range(num_chunks + lag):
        if tick < num_chunks:
            yield "up", tick
        if tick >= lag:
            yield "down", tick - lag


@dataclass(frozen=True)
class Pipelined(Algorithm):
    """Partial sums go from rank 0 to the last, chunk by chunk, and results back, both at the same time.

    Why: each link carries the buffer once in each direction, and sums grow in the order of ranks, so the bits do
    not depend on the number of chunks. Costs a chain of latencies, so it is for large buffers:
    (k + 2(p-1))·(α + n/k·β) with k chunks.
    """

    name = "pipelined"
    keeps_rank_order = True

    num_chunks: int | None = None
    """None: chunks of about half a megabyte, at most 64."""

    def __post_init__(self) -> None:
        if self.num_chunks is not None and self.num_chunks < 1:
            raise InvalidArgument("num_chunks must be at least 1", got=self.num_chunks)

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        chain = _Chain(flat.tensor_split(self._num_chunks(flat.numel() * flat.element_size())), channel)
        for move, index in chain_moves(channel.position, channel.size, len(chain.chunks)):
            if move == "up":
                chain.move_up(index, op)
            else:
                chain.move_down(index)
        chain.wait()

    @override
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        num_chunks = self._num_chunks(num_bytes)
        chunk_bytes = num_bytes / num_chunks
        tick_s = costs.flat.exchange_s(2 * chunk_bytes, num_messages=2) + chunk_bytes * costs.fold_byte_s
        return (num_chunks + 2 * (costs.num_ranks - 1)) * tick_s

    def _num_chunks(self, num_bytes: int) -> int:
        return self.num_chunks or min(_MAX_CHUNKS, max(1, math.ceil(num_bytes / _CHUNK_BYTES)))


class _Chain:
    """One rank's part of the chain. Each receive is posted a chunk ahead, so a message never waits for its receiver."""

    def __init__(self, chunks: tuple[Tensor, ...], channel: Channel) -> None:
        self.chunks = chunks
        self._channel = channel
        self._is_first, self._is_last = channel.position == 0, channel.position == channel.size - 1
        # tensor_split puts the largest chunk first.
        self._buffers = [chunks[0].new_empty(chunks[0].numel()) for _ in range(2)]
        self._climbing: list[Transfer] = [None] * len(chunks)
        self._sent: list[Transfer] = []
        self._from_below = [self._receive_up(index) for index in range(min(2, len(chunks)))]
        self._from_above: list[Transfer] = []

    def move_up(self, index: int, op: ReduceOp) -> None:
        """Fold chunk `index` into the sum received from below and send it on."""
        chunk = self.chunks[index]
        if not self._is_first:
            self._channel.wait(self._from_below[index])
            fold_into(chunk, self._arrival(index), op)
            if index + 2 < len(self.chunks):
                self._from_below.append(self._receive_up(index + 2))
        if self._is_last:
            finish_fold(chunk, op, self._channel.size)
        else:
            self._climbing[index] = self._channel.send(chunk, self._channel.position + 1)

    def move_down(self, index: int) -> None:
        """Receive the whole sum of chunk `index` from above and send it on."""
        if not self._is_last:
            if index == 0:
                self._receive_down(0)
            self._channel.wait(self._from_above[index])
            # By the order of ticks the next chunk has been sent up already, so it can be overwritten.
            if index + 1 < len(self.chunks):
                self._receive_down(index + 1)
        if not self._is_first:
            self._sent.append(self._channel.send(self.chunks[index], self._channel.position - 1))

    def wait(self) -> None:
        """Return when everything sent has arrived."""
        self._channel.wait(*self._sent)

    def _arrival(self, index: int) -> Tensor:
        return self._buffers[index % 2][: self.chunks[index].numel()]

    def _receive_up(self, index: int) -> Transfer:
        return None if self._is_first else self._channel.receive(self._arrival(index), self._channel.position - 1)

    def _receive_down(self, index: int) -> None:
        self._channel.wait(self._climbing[index])
        self._from_above.append(self._channel.receive(self.chunks[index], self._channel.position + 1))
