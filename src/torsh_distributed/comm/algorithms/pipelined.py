"""Pipelined all-reduce: chunks climb a chain of ranks while finished ones come back down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, LinkFigures
from torsh_distributed.comm.algorithms.fold import finish_fold, fold_into
from torsh_distributed.comm.algorithms.lane import Lane, Transfer
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import InvalidArgument

_CHUNK_BYTES = 512 * 1024
_MAX_CHUNKS = 64


def chain_moves(position: int, size: int, num_chunks: int) -> Iterator[tuple[Literal["up", "down"], int]]:
    """What a rank of the chain does, in order: fold chunk c on its way up, pass chunk c on its way down.

    By the clock of the chain, chunk c is folded at `position` at the tick c + position and comes back through it at
    c + 2(size - 1) - position; each rank makes its moves in order of ticks, so nobody waits in a circle.
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

    Why: each link carries the buffer once in each direction, and sums grow in the order of ranks, so the bits are
    the same however many ranks share the work of a chunk. Costs a chain of latencies, so it is for large buffers:
    (k + 2(p-1))·(α + n/k·β) with k chunks.
    """

    name = "pipelined"
    keeps_rank_order = True

    num_chunks: int | None = None
    """Left out: chunks of about half a megabyte, at most 64."""

    def __post_init__(self) -> None:
        if self.num_chunks is not None and self.num_chunks < 1:
            raise InvalidArgument("num_chunks must be at least 1", got=self.num_chunks)

    @override
    def all_reduce(self, flat: Tensor, op: ReduceOp, lane: Lane) -> None:
        chunks = flat.tensor_split(self._num_chunks(flat.numel() * flat.element_size()))
        here, last = lane.position, lane.size - 1
        arrival = flat.new_empty(chunks[0].numel())  # the first chunk is never smaller than another
        climbing: list[Transfer] = [None] * len(chunks)
        sent: list[Transfer] = []
        for move, index in chain_moves(here, lane.size, len(chunks)):
            chunk = chunks[index]
            if move == "up":
                if here > 0:
                    lane.wait(lane.receive(arrival[: chunk.numel()], here - 1))
                    fold_into(chunk, arrival[: chunk.numel()], op)
                if here < last:
                    climbing[index] = lane.send(chunk, here + 1)
                else:
                    finish_fold(chunk, op, lane.size)
            else:
                if here < last:
                    lane.wait(climbing[index])
                    lane.wait(lane.receive(chunk, here + 1))
                if here > 0:
                    sent.append(lane.send(chunk, here - 1))
        lane.wait(*sent)

    @override
    def estimated_s(self, num_bytes: int, figures: LinkFigures) -> float | None:
        num_chunks = self._num_chunks(num_bytes)
        chunk_bytes = num_bytes / num_chunks
        tick_s = figures.flat.exchange_s(2 * chunk_bytes, num_messages=2) + chunk_bytes * figures.fold_byte_s
        return (num_chunks + 2 * (figures.num_ranks - 1)) * tick_s

    def _num_chunks(self, num_bytes: int) -> int:
        return self.num_chunks or min(_MAX_CHUNKS, max(1, math.ceil(num_bytes / _CHUNK_BYTES)))
