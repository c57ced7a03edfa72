"""Experts: tokens get what their experts compute, weighted by the gate."""

from __future__ import annotations

import pydantic
import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.config.section_models import DeepSpeedFP16Config, DeepSpeedZeroConfig
from torsh_distributed.migrate.deepspeed.surface.moe_layer import MoE


@pytest.mark.parametrize("k", [1, 2])
def test_outputs_are_the_experts_weighted_by_their_gates(k: int) -> None:
    torch.manual_seed(0)
    layer = MoE(6, nn.Linear(6, 6), num_experts=3, k=k, drop_tokens=False)
    for expert in layer.experts:
        nn.init.normal_(expert.weight)
    inputs = torch.randn(2, 5, 6)
    out, balance, counts = layer(inputs)
    gates = torch.softmax(inputs.view(-1, 6) @ layer.gate.weight.T, dim=1)
    values, chosen = gates.topk(k, dim=1)
    weights = values if k == 1 else values / values.sum(dim=1, keepdim=True)
    for row, token in enumerate(inputs.view(-1, 6)):
        expected = sum(weights[row, place] * layer.experts[chosen[row, place]](token) for place in range(k))
        torch.testing.assert_close(out.view(-1, 6)[row], expected)
    assert int(counts.sum()) == 10
    assert balance.item() >= 0.99
    (out.sum() + balance).backward()
    assert layer.gate.weight.grad is not None


def test_tokens_above_the_capacity_are_dropped() -> None:
    layer = MoE(2, nn.Identity(), num_experts=2, capacity_factor=1.0, min_capacity=1)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor([[9.0, 9.0], [-9.0, -9.0]]))
    out, _, counts = layer(torch.ones(4, 2))
    assert counts.tolist() == [2, 0]
    assert (out.abs().sum(dim=1) > 0).tolist() == [True, True, False, False]
    with pytest.raises(AssertionError, match="should be divisible by expert parallel size"):
        MoE(2, nn.Identity(), num_experts=3, ep_size=2)
    with pytest.raises(FeatureNotAvailable, match="every rank"):
        MoE(2, nn.Identity(), num_experts=2, enable_expert_tensor_parallelism=True)


def _experts(ep_size: int) -> nn.Module:
    torch.manual_seed(0)
    layer = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=ep_size, k=2, drop_tokens=False)
    for expert in layer.experts:
        nn.init.normal_(expert.weight)
    return layer


def _points(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def spread_over_two(stage: int) -> list[float]:
    layer = _experts(ep_size=2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
    losses = []
    for step in range(4):
        mine = _points(step).chunk(2)[torch.distributed.get_rank()]
        out, _, _ = engine(mine)
        loss = (out - mine).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_of_several_ranks_train_as_one_process(world: World, stage: int) -> None:
    layer = _experts(ep_size=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        points = _points(step)
        loss = (layer(points)[0] - points).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    by_rank = world.run(spread_over_two, stage, num_ranks=2)
    assert [sum(one) / 2 for one in zip(*by_rank, strict=True)] == pytest.approx(losses, rel=1e-5)


def test_sections_are_models_with_deepspeeds_defaults() -> None:
    assert DeepSpeedZeroConfig(stage=3, reduce_bucket_size="auto").model_dump()["reduce_bucket_size"] == 500_000_000
    assert DeepSpeedFP16Config(enabled=True).model_dump()["hysteresis"] == 2
    with pytest.raises(pydantic.ValidationError, match="stagee"):
        DeepSpeedZeroConfig(stagee=3)
