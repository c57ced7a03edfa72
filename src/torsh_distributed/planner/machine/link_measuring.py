"""Measures what ranks cost each other: collectives by size, and how much of a communication a computation hides."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torsh_distributed.comm.measurement import time_collective
from torsh_distributed.planner.machine.measured_rates import SizeTable

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SIZES = (2**10, 2**16, 2**20, 2**22, 2**24)
_SENT_BYTES = 2**23
_SIDE = 256
_ROUNDS = 5


@dataclass(frozen=True)
class Interference:
    """What a computation and a communication do to each other when they run at the same time."""

    compute_slowdown: float
    """How many times longer the computation takes."""
    communication_slowdown: float
    overlap: float
    """How much of the shorter one costs nothing: 0 if they take as long as one after the other, 1 if it is free."""


def measure_collectives(duration_s: float) -> dict[str, SizeTable]:
    """Seconds of collectives on the world's group by the bytes of the whole buffer; every rank calls this."""
    return {
        op: SizeTable(
            tuple(map(float, _SIZES)),
            tuple(time_collective(op, size, duration_s=duration_s).median_s for size in _SIZES),
        )
        for op in OPERATIONS
    }


def measure_interference() -> Interference:
    """Products of matrices while an all-reduce travels, against each by itself; every rank calls this."""
    buffer = torch.ones(_SENT_BYTES // 4)
    square = torch.randn(_SIDE, _SIDE)
    alone_s = slowest_s(lambda: dist.all_reduce(buffer))
    one_s = slowest_s(lambda: square @ square)
    count = max(1, round(alone_s / one_s))

    def compute() -> None:
        for _ in range(count):
            square @ square

    ends: list[float] = []

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        started = time.perf_counter()
        compute()
        ends.append(time.perf_counter() - started)
        work.wait()

    compute_s, together_s = slowest_s(compute), slowest_s(both)
    saved_s = compute_s + alone_s - together_s
    return Interference(
        compute_slowdown=_agreed(sorted(ends)[len(ends) // 2]) / compute_s,
        communication_slowdown=together_s / alone_s,
        overlap=min(1.0, max(0.0, saved_s / min(compute_s, alone_s))),
    )


def slowest_s(call: Callable[[], object]) -> float:
    """The median of some calls, on the slowest rank; the same on every rank."""
    taken = []
    call()
    for _ in range(_ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        call()
        taken.append(_agreed(time.perf_counter() - started))
    return sorted(taken)[len(taken) // 2]


def _agreed(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
