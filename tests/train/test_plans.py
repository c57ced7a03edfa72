"""The shipped plans train: a few steps of a demo each, to the losses of one process on the same batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

from tests.bed.world import ROOT, World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.batches import DataOrder, sharded
from torsh_distributed.train.demos import DEMOS

STEPS, BATCH = 2, 4
_SHORT = {"context", "data_parallel", "experts", "fp16", "tensor"}
LOW_PRECISION = {"bf16": 0.02, "fp16": 0.005}


def world_of(plan: Plan) -> int:
    """The ranks that a plan is for: 2 where it fills the world."""
    degrees = plan.mesh.degrees.values()
    return 2 if -1 in degrees else math.prod(degrees)


def demo_of(plan: Plan) -> str:
    """The GPT; the MLP in low precision, which a CPU may only imitate; the one with experts where these are spread."""
    if plan.precision.dtype != "fp32":
        return "mlp"
    return "moe" if plan.mesh.ep > 1 else "gpt"


def shortened(path: Path) -> Plan:
    """Two steps of few samples, but enough for every pass and every microbatch of a pipeline."""
    plan = Plan.load(path)
    mesh = plan.mesh.resolve(world_of(plan))
    needed = mesh.data_degree * (plan.pipeline.num_microbatches if mesh.pp > 1 else 1)
    batch_size = max(BATCH, needed) * plan.training.gradient_accumulation
    # Rates that change with the number of ranks have tests of their own.
    return plan.replace(training={"steps": STEPS, "batch_size": batch_size, "warmup_steps": 0, "lr_scaling": "none"})


def bound_of(plan: Plan) -> float:
    """How far losses may be from those in fp32."""
    is_rounded_on_the_wire = plan.fsdp.gather_codec != "none" or plan.compress.method != "none"
    return 0.02 if is_rounded_on_the_wire else LOW_PRECISION.get(plan.precision.dtype, 1e-4)


def train_alone(path: Path) -> list[float]:
    """Plain torch, in fp32, on the global batches."""
    plan = shortened(path)
    demo = DEMOS[demo_of(plan)](plan)
    losses = []
    for inputs, targets in itertools.islice(global_batches(demo.loader, plan.training.seed), STEPS):
        demo.optimizer.zero_grad()
        loss = demo.loss_fn(demo.model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        if plan.training.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(demo.model.parameters(), plan.training.gradient_clipping)
        demo.optimizer.step()
    return losses


def global_batches(loader: DataLoader[Any], seed: int) -> Iterator[Any]:
    return (piece.batch for piece in sharded(loader, DataOrder(seed=seed), part=0, num_parts=1))


def train_as_planned(path: Path) -> list[float]:
    plan = shortened(path)
    demo = DEMOS[demo_of(plan)](plan)
    engine = parallelize(demo.model, demo.optimizer, plan, loss_fn=demo.loss_fn)
    return [engine.step(batch) for batch in engine.batches(demo.loader)]


def in_short_form(path: Path) -> bool:
    """One plan of each kind; the drawn trainings of `tests/right` have pairs of axes."""
    return path.stem in _SHORT


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if in_short_form(path) else pytest.mark.matrix)
        for path in sorted((ROOT / "examples/plans").glob("*.toml"))
    ],
)
def test_a_shipped_plan_trains_as_one_process_does(world: World, path: Path) -> None:
    plan = Plan.load(path)
    expected = train_alone(path)
    for losses in world.run(train_as_planned, path, num_ranks=world_of(plan), backend="torsh", timeout_s=60):
        assert losses == pytest.approx(expected, abs=bound_of(plan))
        assert len(losses) == STEPS
