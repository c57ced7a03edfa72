"""The estimate of a plan whose logits never exist whole, against a real training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bed.world import World
from tests.planner.live_memory import LARGE_VOCABULARY, char_gpt, large_vocabulary, measured_peak
from torsh_distributed.plan import Plan
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.profiling import profile_model

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "passes": (1, {"training": {"gradient_accumulation": 2}}),
    "bf16": (1, {"precision": {"dtype": "bf16"}}),
    "replicas": (2, {"dp": 2}),
    "shards": (2, {"dp": 1, "shard": 2}),
    "shards in bf16": (2, {"dp": 1, "shard": 2, "precision": {"dtype": "bf16"}}),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["one", *(pytest.param(name, marks=pytest.mark.matrix) for name in PLANS if name != "one")]
)
def test_the_estimate_is_near_the_measured_peak(world: World, name: str) -> None:
    num_ranks, sections = PLANS[name]
    training = {"batch_size": 32 * num_ranks, "fused_loss": True, **sections.get("training", {})}
    plan = Plan(**{**sections, "training": training})
    profile = profile_model(large_vocabulary(), plan)
    table = estimate_memory(profile, plan.resolve(num_ranks), optimizer_named("AdamW"), device_type="cpu")
    measured = max(world.run(measured_peak, large_vocabulary, plan, num_ranks=num_ranks, timeout_s=120))
    assert table.peak_bytes == pytest.approx(measured, rel=0.06), table.peak


def peak(plan: Plan, device_type: str) -> float:
    profile = profile_model(large_vocabulary(), plan)
    return estimate_memory(profile, plan, optimizer_named("AdamW"), device_type=device_type).peak_bytes


def test_auto_fuses_a_large_head_on_a_gpu_alone() -> None:
    auto = Plan(dp=1, training={"batch_size": 64})
    whole = auto.replace(training={"fused_loss": False})
    assert peak(auto, "cuda") < 0.6 * peak(whole, "cuda")
    assert peak(auto, "cpu") == peak(whole, "cpu")


def test_layouts_that_split_the_head_have_whole_logits() -> None:
    plan = Plan(dp=1, tp=2, training={"batch_size": 64}).resolve(2)
    whole = plan.replace(training={"fused_loss": False})
    assert peak(plan, "cuda") == peak(whole, "cuda")


def test_a_small_head_is_traced_once_more_only_if_the_plan_asks() -> None:
    assert profile_model(char_gpt()).fused_loss is None
    fused = profile_model(char_gpt(), Plan(training={"fused_loss": True})).fused_loss
    assert fused is not None
    assert fused.num_classes == 96
    assert fused.num_classes < LARGE_VOCABULARY
