"""Models split over ranks: tensor parallelism against DTensor by hand, and pipelines against their schedules."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.parallel.pipeline import PipelineParallel, compute_timeline
from torsh_distributed.parallel.tensor import tensor_parallel, tensor_parallel_context
from torsh_distributed.plan.sections.mesh import STAGES_PER_RANK, PipelineConfig

WIDTH, HEADS, LENGTH, BATCH, LAYERS = 256, 8, 64, 8, 4


class Block(nn.Module):
    """A transformer block that may have only a rank's heads: their number is read from the tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.head_dim = width // HEADS
        self.attention_norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        normed = self.attention_norm(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.o_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


def _model(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(LAYERS)))


def _tensor_s(kind: str, width: int, batch_size: int, num_steps: int) -> float:
    """Median seconds of forward and backward on the slowest rank; runs on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _model(width)
    hidden = torch.randn(batch_size, LENGTH, width)
    if kind == "by hand":
        column = ("q_proj", "k_proj", "v_proj", "mlp.0")
        plan = {name: ColwiseParallel() for name in column} | {name: RowwiseParallel() for name in ("o_proj", "mlp.2")}
        for block in model:
            parallelize_module(block, mesh, plan)
        return _median_s(lambda: model(hidden).square().mean().backward(), num_steps)
    split = tensor_parallel(model, mesh)

    def step() -> None:
        with tensor_parallel_context(split):
            model(hidden).square().mean().backward()

    return _median_s(step, num_steps)


def _median_s(step: Callable[[], object], num_steps: int) -> float:
    times = []
    for number in range(num_steps + 2):
        dist.barrier()
        started = time.perf_counter()
        step()
        if number >= 2:
            times.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _pipeline_s(schedule: str, num_sequences: int, num_steps: int) -> list[tuple[float, float, float, float]]:
    """For every step: its span, the span computed from the schedule and the mean time of its actions, both bubbles."""
    config = PipelineConfig(schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule][0], num_microbatches=4)
    group = dist.group.WORLD
    assert group is not None
    pipe = PipelineParallel(_model(), config, group=group, loss_fn=functional.mse_loss)
    hidden = torch.randn(4 * num_sequences, LENGTH, WIDTH)
    out = []
    for number in range(num_steps + 2):
        pipe.step(hidden, hidden)
        measured = pipe.measured_timeline()
        planned = compute_timeline(config, measured.num_ranks, costs=measured.costs)
        if number >= 2:
            out.append((measured.span, planned.span, measured.bubble, planned.bubble))
    return out


def _tensor_row(world: World, width: int, batch_size: int, num_steps: int, rounds: int) -> Row:
    contestants = (("ours", "torsh"), ("by hand", "torsh"), ("ours", "gloo"))
    found = [
        [
            world.run(_tensor_s, kind, width, batch_size, num_steps, backend=backend, timeout_s=120)[0]
            for kind, backend in contestants
        ]
        for _ in range(rounds)
    ]
    ours, by_hand, on_gloo = (Measurement.of(list(times)) for times in zip(*found, strict=True))
    return Row(
        name=f"tensor parallel, 2 ranks, width {width}, batch {batch_size}",
        unit=Unit.SECONDS,
        ours=ours,
        rivals={"DTensor by hand": by_hand, "on gloo": on_gloo},
    )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    num_steps, rounds = (1, 1) if budget.is_quick else (20, 5)
    schedules = ("one_f_one_b", "zbv_zero_bubble") if budget.is_quick else tuple(STAGES_PER_RANK)
    world = World()
    try:
        sizes = [(WIDTH // 2, 1)] if budget.is_quick else [(WIDTH, BATCH), (WIDTH, 1), (WIDTH // 2, 1)]
        yield from (_tensor_row(world, width, size, num_steps, rounds) for width, size in sizes)
        for schedule in schedules:
            amount = (2, 1) if budget.is_quick else (64, 5)
            steps = world.run(_pipeline_s, schedule, *amount, backend="torsh", timeout_s=300)[0]
            spans, allowed, measured, planned = zip(*steps, strict=True)
            yield Row(
                name=f"pipeline {schedule}, 2 ranks",
                unit=Unit.SECONDS,
                ours=Measurement.of(spans),
                rivals={"as scheduled": Measurement.of(allowed)},
            )
            bubbles = f"measured {statistics.median(measured):.1%}, computed {statistics.median(planned):.1%}"
            yield Note(text=f"{schedule}: bubble {bubbles}")
    finally:
        world.close()


CASE = Case(
    title="Models split over ranks",
    about="""Four transformer blocks of width 256, forward and backward, two ranks with one thread each. Tensor: our
    layers against torch's DTensor styles applied by hand on the same backend, and against ours on gloo: with eight
    sequences of 64, where arithmetic dominates, with one, and with one at half the width. Pipeline: four microbatches
    of 64 sequences, enough that sending them takes little of the time; the span of a step against the one computed from
    its schedule and the mean time of its actions.""",
    rows=_rows,
)
