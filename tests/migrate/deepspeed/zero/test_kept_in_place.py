"""Calls that move or cast a module after `initialize`, and copies of gathered parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.zero.gathered_parameters import GatheredParameters


def made(stage: int) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def trained(engine: Any) -> float:
    loss = engine(torch.ones(2, 4) + dist.get_rank()).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def move_and_copy() -> list[list[float]]:
    """Losses with such calls in between, by stage; runs on ranks."""
    found = []
    for stage in range(4):
        engine = made(stage)
        losses = [trained(engine)]
        engine.to("cpu")
        engine.module.float()
        engine.module[0].to(torch.device("cpu"), torch.float32)
        losses += [trained(engine), trained(engine)]
        found.append(losses)
        if stage > 1:
            with pytest.raises(FeatureNotAvailable, match=r"torch.float32 on cpu and cannot become torch.float16"):
                engine.module.half()
        with GatheredParameters(list(engine.module.parameters())):
            for param in engine.module.parameters():
                twin = copy.deepcopy(param)
                assert isinstance(twin, nn.Parameter)
                assert not hasattr(twin, "to_local")
                assert torch.equal(twin, param)
    return found


@pytest.mark.ranks
def test_a_call_that_changes_nothing_does_nothing(world: World) -> None:
    for by_stage in world.run(move_and_copy, num_ranks=2, backend="torsh", timeout_s=80):
        for losses in by_stage[1:]:
            assert losses == pytest.approx(by_stage[0], rel=1e-5)
