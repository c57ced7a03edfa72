"""DeepSpeed's engine surface: a step through forward, backward and step against the same plan through our Engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.migrate import deepspeed
from torsh_distributed.plan import Plan
from torsh_distributed.train import CpuAdam, parallelize

WIDTH, DEPTH, BATCH, NUM_RANKS = 1024, 8, 8, 2
STAGES = {0: "replicas", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def _through_script(stage: int) -> Callable[[], float]:
    """As a DeepSpeed script does it."""
    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=CpuAdam(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
        },
    )
    inputs, targets = _batch()

    def step() -> float:
        loss = functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _through_engine(stage: int) -> Callable[[], float]:
    """The same plan through our Engine."""
    sections: dict[str, dict[str, object]] = {
        "mesh": {"dp": 1, "shard": -1} if stage else {"dp": -1},
        "training": {"gradient_clipping": 1.0},
        "ddp": {"broadcast_buffers": False},
    }
    if stage:
        sections["fsdp"] = {"strategy": STAGES[stage]}
    model = _model()
    optimizer = CpuAdam(model.parameters(), lr=1e-3)
    engine = parallelize(model, optimizer, Plan.from_dict(sections), loss_fn=functional.mse_loss)
    batch = _batch()
    return lambda: engine.step(batch)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return inputs, inputs.roll(1, dims=1)


def _in_turns(stage: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Median seconds of a step of each kind in every round, both in the same processes; runs on every rank."""
    sides = {"script": _through_script(stage), "engine": _through_engine(stage)}
    for step in sides.values():
        for _ in range(5):
            step()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name in sorted(sides, reverse=bool(round_ % 2)):
            times = []
            for _ in range(steps):
                dist.barrier()
                started = time.perf_counter()
                sides[name]()
                times.append(time.perf_counter() - started)
            found[name].append(statistics.median(times))
    return found


def _rows(budget: Budget) -> Iterator[Row | Note]:
    rounds, steps = (2, 3) if budget.is_quick else (12, 20)
    world = World()
    try:
        for stage in (0, 3) if budget.is_quick else STAGES:
            found = world.run(_in_turns, stage, rounds, steps, num_ranks=NUM_RANKS, backend="torsh", timeout_s=300)[0]
            yield Row(
                name=f"stage {stage} ({STAGES[stage]}), {NUM_RANKS} ranks",
                unit=Unit.SECONDS,
                ours=Measurement.of(found["script"]),
                rivals={"our Engine": Measurement.of(found["engine"])},
            )
    finally:
        world.close()


CASE = Case(
    title="DeepSpeed's engine surface",
    about="""8 × Linear 1024 (8.4 M parameters), batch 8 on each of two ranks, one thread each, fp32, CpuAdam, clipping:
    a step through `deepspeed.initialize` (forward, backward, step) against `Engine.step` with the same plan, in turns
    in the same processes.""",
    rows=_rows,
)
