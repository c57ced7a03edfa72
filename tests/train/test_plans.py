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
from torsh_distributed.train.demos import DEMOS
from torsh_distributed.train.sharding import sharded

PLANS = sorted((ROOT / "examples/plans").glob("*.toml"))
STEPS, BATCH = 2, 4
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
    plan = Plan.load(path)
    passes = plan.training.gradient_accumulation
    # Rates that change with the number of ranks have tests of their own.
    return plan.replace(
        training={"steps": STEPS, "batch_size": BATCH * passes, "warmup_steps": 0, "lr_scaling": "none"}
    )


def train_alone(path: Path) -> list[float]:
    """Plain torch, in fp32, on the global batches."""
    plan = shortened(path)
    demo = DEMOS[demo_of(plan)](plan)
    losses = []
    for inputs, targets in itertools.islice(global_batches(demo.loader, plan.training.seed), STEPS):
        demo.optimizer.zero_grad()
        loss = demo.loss_fn(demo.model(inputs), targets)
        loss.backward()
        if plan.training.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(demo.model.parameters(), plan.training.gradient_clipping)
        demo.optimizer.step()
        losses.append(loss.item())
    return losses


def global_batches(loader: DataLoader[Any], seed: int) -> Iterator[Any]:
    return (piece.batch for piece in sharded(loader, part=0, num_parts=1, seed=seed))


def train_as_planned(paths: list[Path]) -> list[list[float]]:
    found = []
    for path in paths:
        plan = shortened(path)
        demo = DEMOS[demo_of(plan)](plan)
        engine = parallelize(demo.model, demo.optimizer, plan, loss_fn=demo.loss_fn)
        found.append([engine.step(batch) for batch in engine.batches(demo.loader)])
    return found


@pytest.mark.parametrize("num_ranks", sorted({world_of(Plan.load(path)) for path in PLANS}))
def test_every_shipped_plan_trains_as_one_process_does(world: World, num_ranks: int) -> None:
    paths = [path for path in PLANS if world_of(Plan.load(path)) == num_ranks]
    expected = [train_alone(path) for path in paths]
    for losses in world.run(train_as_planned, paths, num_ranks=num_ranks, backend="torsh", timeout_s=80):
        for path, mine, alone in zip(paths, losses, expected, strict=True):
            bound = LOW_PRECISION.get(Plan.load(path).precision.dtype, 1e-4)
            assert mine == pytest.approx(alone, abs=bound), path.name
            assert len(mine) == STEPS
