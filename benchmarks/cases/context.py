"""Attention over split sequences: keys around a ring against heads in exchange for positions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.parallel.context.attention_heads import heads_attention
from torsh_distributed.parallel.context.attention_ring import ring_attention
from torsh_distributed.parallel.context.positions import PositionMask, choose_form

HEAD_DIM = 64
WINDOW = 256


@dataclass(frozen=True)
class Shape:
    """One attention: the whole sequence, and heads of queries and of keys."""

    num_ranks: int
    length: int
    heads: int
    shared: int
    has_window: bool = False
    """Whether a query sees only the last keys, which is a mask that no kernel has built in."""

    @property
    def mask(self) -> PositionMask:
        """What queries see."""
        return PositionMask(allowed=in_window) if self.has_window else PositionMask(is_causal=True)

    def __str__(self) -> str:
        window = f", window {WINDOW}" if self.has_window else ""
        return f"{self.num_ranks} ranks, length {self.length}, {self.heads} heads, {self.shared} of keys{window}"


FULL_SHAPES = (
    *(Shape(2, length, 8, shared) for length in (256, 1024, 4096) for shared in (8, 2)),
    Shape(2, 1024, 32, 4),
    Shape(2, 1024, 8, 2, True),
    Shape(2, 4096, 8, 2, True),
    *(Shape(4, length, 8, shared) for length in (256, 1024, 4096) for shared in (8, 1)),
    Shape(4, 4096, 8, 2, True),
)
QUICK_SHAPES = (Shape(2, 256, 8, 2), Shape(4, 256, 8, 1), Shape(2, 256, 8, 2, True))


def in_window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A sliding window, as transformers describes it."""
    return (key <= query) & (key > query - WINDOW)


def _seconds(shape: Shape, num_steps: int) -> dict[str, list[float]]:
    """Seconds of forward and backward of both forms in turns, on the slowest rank; runs on every rank."""
    group = dist.group.WORLD
    assert group is not None
    part = shape.length // dist.get_world_size()
    query = torch.randn(1, shape.heads, part, HEAD_DIM, requires_grad=True)
    key, value = (torch.randn(1, shape.shared, part, HEAD_DIM, requires_grad=True) for _ in range(2))
    mask = shape.mask
    forms: dict[str, Callable[..., torch.Tensor]] = {"ulysses": heads_attention, "ring": ring_attention}
    found: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(num_steps + 1):
        for name, attend in forms.items():
            dist.barrier()
            started = time.perf_counter()
            attend(query, key, value, group=group, mask=mask).square().mean().backward()
            taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number:
                found[name].append(float(taken))
    return found


def _rows(budget: Budget) -> Iterator[Row | Note]:
    shapes, num_steps = (QUICK_SHAPES, 1) if budget.is_quick else (FULL_SHAPES, 7)
    world = World()
    disagreeing: list[str] = []
    try:
        for shape in shapes:
            times = world.run(_seconds, shape, num_steps, num_ranks=shape.num_ranks, backend="torsh", timeout_s=300)[0]
            yield Row(
                name=str(shape),
                unit=Unit.SECONDS,
                ours=Measurement.of(times["ulysses"]),
                rivals={"ring": Measurement.of(times["ring"])},
            )
            quicker = min(times, key=lambda name: statistics.median(times[name]))
            chosen = choose_form("auto", heads=shape.heads, size=shape.num_ranks, length=shape.length, mask=shape.mask)
            if quicker != chosen:
                disagreeing.append(str(shape))
    finally:
        world.close()
    yield Note(text=f'context.form = "auto" takes the slower form for: {"; ".join(disagreeing) or "none of them"}')


CASE = Case(
    title="Attention over split sequences",
    about="""Causal attention, forward and backward, head dim 64, batch 1, ranks with one thread each. "torsh" is
    ulysses: ranks exchange positions for heads, and torch's attention runs on whole sequences. The rival passes keys
    and values around a ring. Both in turns in one run.""",
    rows=_rows,
)
