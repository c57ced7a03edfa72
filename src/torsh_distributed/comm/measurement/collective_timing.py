"""How long collectives take on the world's group, measured the same way for every backend.

Calls go through torch.distributed, as DDP and FSDP make them; those named `td.` are our own. A block of calls is timed
as a whole, on every rank; the slowest rank counts, because a step waits for it. All ranks agree on the number of calls
in a block.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import c10d_all_gather_single
from torsh_distributed.comm.collectives.reductions import all_reduce, c10d_reduce_scatter_single
from torsh_distributed.errors import InvalidArgument

_BLOCKS = 5
_MAX_CALLS = 20_000


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """One operation at one size: seconds per call in the median block and in the best one, on the slowest rank."""

    op: str
    num_bytes: int
    median_s: float
    best_s: float
    num_calls: int

    @property
    def bytes_per_s(self) -> float:
        """The buffer's bytes over the median time (algorithm bandwidth)."""
        return self.num_bytes / self.median_s


def _all_reduce(buffer: Tensor, size: int) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffer)


def _our_all_reduce(buffer: Tensor, size: int) -> Callable[[], object]:
    return lambda: all_reduce(buffer)


def _broadcast(buffer: Tensor, size: int) -> Callable[[], object]:
    return lambda: dist.broadcast(buffer, 0)


def _all_gather(buffer: Tensor, size: int) -> Callable[[], object]:
    part = buffer[: buffer.numel() // size].clone()
    whole = buffer[: part.numel() * size]
    return lambda: c10d_all_gather_single(whole, part)


def _reduce_scatter(buffer: Tensor, size: int) -> Callable[[], object]:
    part = buffer[: buffer.numel() // size].clone()
    whole = buffer[: part.numel() * size]
    return lambda: c10d_reduce_scatter_single(part, whole)


def _all_to_all(buffer: Tensor, size: int) -> Callable[[], object]:
    whole = buffer[: buffer.numel() // size * size]
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole)


OPERATIONS: dict[str, Callable[[Tensor, int], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "td.all_reduce": _our_all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def time_collective(op: str, num_bytes: int, *, duration_s: float = 0.5) -> CollectiveTiming:
    """Time `op` on a float32 buffer of `num_bytes`, for about `duration_s`; every rank of the world calls this.

    `num_bytes` is the whole buffer: what all_gather fills, what reduce_scatter and all_to_all take in. Every block of
    calls starts with normally distributed values, like gradients: a backend may be faster with equal values.
    """
    if op not in OPERATIONS:
        raise InvalidArgument("unknown operation", hint=f"use one of: {', '.join(OPERATIONS)}", op=op)
    size = dist.get_world_size()
    values = torch.randn(max(num_bytes // 4, size), generator=torch.Generator().manual_seed(dist.get_rank()))
    buffer = values.clone()
    call = OPERATIONS[op](buffer, size)
    call()

    def block(calls: int) -> float:
        buffer.copy_(values)
        return _block(call, calls)

    calls = 1
    spent = block(calls)
    # Double until a block is long enough to time; the time is the slowest rank's, so all ranks stop together.
    while spent < duration_s / _BLOCKS / 2 and calls < _MAX_CALLS:
        calls = min(_MAX_CALLS, max(calls * 2, int(calls * duration_s / _BLOCKS / 2 / spent)))
        spent = block(calls)
    per_call = [block(calls) / calls for _ in range(_BLOCKS)]
    return CollectiveTiming(
        op=op,
        num_bytes=num_bytes,
        median_s=statistics.median(per_call),
        best_s=min(per_call),
        num_calls=calls * _BLOCKS,
    )


def _block(call: Callable[[], object], calls: int) -> float:
    """Seconds that `calls` calls took on the slowest rank; the same number on every rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)
