"""Experts: tokens get what their experts compute, weighted by the gate, as in DeepSpeed and as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.bed.world import World
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from tests.migrate.deepspeed.moe import experts
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.moe.moe_layer import MoE


@pytest.mark.parametrize("k", [1, 2, 3])
def test_outputs_are_the_experts_weighted_by_their_gates(k: int) -> None:
    torch.manual_seed(0)
    layer = MoE(6, nn.Linear(6, 6), num_experts=4, k=k, drop_tokens=False, top2_2nd_expert_sampling=False)
    inner = layer.deepspeed_moe.experts.deepspeed_experts
    for expert in inner:
        nn.init.normal_(expert.weight)
    inputs = torch.randn(2, 5, 6)
    out, balance, counts = layer(inputs)
    gates = torch.softmax(inputs.view(-1, 6) @ layer.deepspeed_moe.gate.wg.weight.T, dim=1)
    values, chosen = gates.topk(k, dim=1)
    weights = values if k == 1 else values / values.sum(dim=1, keepdim=True)
    for row, token in enumerate(inputs.view(-1, 6)):
        expected = sum(weights[row, place] * inner[chosen[row, place]](token) for place in range(k))
        torch.testing.assert_close(out.view(-1, 6)[row], expected)
    assert int(counts.sum()) == 10 * k
    assert balance.item() >= 0.99
    (out.sum() + balance).backward()
    assert layer.deepspeed_moe.gate.wg.weight.grad is not None


def test_tokens_above_the_capacity_are_dropped_and_counted() -> None:
    layer = MoE(2, nn.Identity(), num_experts=2, capacity_factor=1.0, min_capacity=1)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(torch.tensor([[9.0, 9.0], [-9.0, -9.0]]))
    kept = set()
    for seed in range(20):
        torch.manual_seed(seed)
        out, _, counts = layer(torch.ones(4, 2))
        assert counts.tolist() == [4, 0]
        rows = (out.abs().sum(dim=1) > 0).nonzero().flatten().tolist()
        assert len(rows) == 2
        kept |= set(rows)
    assert kept == {0, 1, 2, 3}  # at random, not the first ones
    with pytest.raises(AssertionError, match="should be divisible by expert parallel size"):
        MoE(2, nn.Identity(), num_experts=3, ep_size=2)
    with pytest.raises(FeatureNotAvailable, match="whole on its rank"):
        MoE(2, nn.Identity(), num_experts=2, enable_expert_tensor_parallelism=True)
    with pytest.raises(AssertionError, match="greater than min_capacity"):
        MoE(2, nn.Identity(), num_experts=2)(torch.ones(3, 2))


RUNS = [
    ({"k": 1, "ep_size": 2}, experts.config(0, gas=2, clip=0.5)),
    ({"k": 2, "ep_size": 2}, experts.config(1)),
    ({"k": 1, "ep_size": 2}, experts.config(2, clip=0.5)),
    ({"k": 2, "ep_size": 1}, experts.config(2)),
    ({"k": 1, "ep_size": 2}, experts.config(2, "bf16")),
]


@pytest.mark.matrix
@pytest.mark.needs_deepspeed
@pytest.mark.timeout(240)
def test_numbers_are_those_of_deepspeed(world: World, deepspeed_world: DeepSpeedWorld) -> None:
    theirs = deepspeed_world.run_theirs(experts.theirs, experts.GATES, RUNS, 6, timeout_s=120.0)
    ours = world.run(experts.ours, experts.GATES, RUNS, 6, num_ranks=2, timeout_s=120.0)
    for case, mine, other in zip(experts.GATES, ours[0][0], theirs[0][0], strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], msg=f"{case} {name}")
    for rank in range(2):
        for run, mine, other in zip(RUNS, ours[rank][1], theirs[rank][1], strict=True):
            assert mine == pytest.approx(other, rel=1e-2 if "bf16" in run[1] else 1e-5), run
