"""Muon under every stage of ZeRO updates whole matrices: the losses are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.ops import MuonWithAuxAdam

STEPS = 4
PARAMS = {"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.01}


def _model() -> nn.Module:
    torch.manual_seed(0)
    # Five rows over two ranks: shards of different sizes.
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(12, 1))


def _inputs(step: int) -> Tensor:
    return torch.randn(8, 1, 6, generator=torch.Generator().manual_seed(step))


def _loss(model: Any, inputs: Tensor) -> Tensor:
    out: Tensor = model(inputs)
    return (out.float() - inputs.float().sum(dim=(1, 2))[:, None]).square().mean()


def alone() -> list[float]:
    model = _model()
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = MuonWithAuxAdam.from_config(list(model.parameters()), PARAMS, names)
    losses = []
    for step in range(STEPS):
        loss = _loss(model, _inputs(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def under_zero(stage: int, dtype: str) -> list[float]:
    model = _model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Muon", "params": PARAMS},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        mine = _inputs(step).chunk(2)[torch.distributed.get_rank()]
        loss = _loss(engine, mine.to(torch.bfloat16) if dtype == "bf16" else mine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_those_of_one_process(world: World, stage: int) -> None:
    by_rank = world.run(under_zero, stage, "fp32", num_ranks=2)
    assert [sum(one) / 2 for one in zip(*by_rank, strict=True)] == pytest.approx(alone(), rel=1e-5)


def test_masters_are_updated_whole_too(world: World) -> None:
    by_rank = world.run(under_zero, 2, "bf16", num_ranks=2)
    assert [sum(one) / 2 for one in zip(*by_rank, strict=True)] == pytest.approx(alone(), rel=0.02)
