"""Attention over split sequences: keys around a ring against heads in exchange for positions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.parallel.context.attention_heads import heads_attention
from torsh_distributed.parallel.context.attention_ring import ring_attention
from torsh_distributed.parallel.context.position_mask import PositionMask

HEAD_DIM = 64


def _seconds(length: int, heads: int, shared: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of forward and backward of both forms in turns, on the slowest rank; runs on every rank."""
    group = dist.group.WORLD
    assert group is not None
    part = length // dist.get_world_size()
    query = torch.randn(1, heads, part, HEAD_DIM, requires_grad=True)
    key, value = (torch.randn(1, shared, part, HEAD_DIM, requires_grad=True) for _ in range(2))
    mask = PositionMask(is_causal=True)
    found: dict[str, list[float]] = {"ulysses": [], "ring": []}
    for number in range(num_steps + 1):
        for name, attend in (("ulysses", heads_attention), ("ring", ring_attention)):
            dist.barrier()
            started = time.perf_counter()
            attend(query, key, value, group=group, mask=mask).square().mean().backward()
            taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number:
                found[name].append(float(taken))
    return found


def _rows(budget: Budget) -> Iterator[Row | Note]:
    sizes = [(256, 8, 8), (2048, 8, 8), (2048, 8, 2), (8192, 8, 8), (8192, 8, 2)]
    world = World()
    try:
        for length, heads, shared in sizes[:2] if budget.is_quick else sizes:
            steps = (1 if budget.is_quick else 10,)
            times = world.run(_seconds, length, heads, shared, *steps, backend="torsh", timeout_s=300)[0]
            yield Row(
                name=f"length {length}, {heads} query heads, {shared} key-value heads, 2 ranks",
                unit=Unit.SECONDS,
                ours=Measurement.of(times["ulysses"]),
                rivals={"ring": Measurement.of(times["ring"])},
            )
            ratio = statistics.median(times["ring"]) / statistics.median(times["ulysses"])
            yield Note(text=f"length {length}, {shared} key-value heads: a ring takes {ratio:.2f} times as long")
    finally:
        world.close()


CASE = Case(
    title="Attention over split sequences",
    about="""Causal attention, forward and backward, head dim 64, batch 1, two ranks with one thread each. Both forms in
    turns in one run. `context.form = "auto"` exchanges heads where the ranks divide them, else it passes keys around a
    ring.""",
    rows=_rows,
)
