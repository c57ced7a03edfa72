"""The estimated memory of a rank against the peak of a real training, counted by storages, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.bed.world import World
from tests.planner.live_memory import char_gpt, measured_peak, measured_peak_of_lengths, wide
from torsh_distributed.plan import Plan
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.profiling import profile_model

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replicas": (2, {"dp": 2}),
    "accumulated": (2, {"dp": 2, "training": {"batch_size": 16, "gradient_accumulation": 2}}),
    "recomputed": (1, {"activation": {"strategy": "uniform", "every_n_layers": 1}}),
    "every second recomputed": (1, {"activation": {"strategy": "uniform", "every_n_layers": 2}}),
    "selective": (1, {"activation": {"strategy": "selective"}}),
    "zero-1": (2, {"dp": 1, "shard": 2, "fsdp": {"strategy": "shard_optimizer"}}),
    "zero-2": (2, {"dp": 1, "shard": 2, "fsdp": {"strategy": "shard_grad_op"}}),
    "zero-3": (2, {"dp": 1, "shard": 2}),
    "zero-3 accumulated": (2, {"dp": 1, "shard": 2, "training": {"batch_size": 16, "gradient_accumulation": 2}}),
    "tensor": (2, {"dp": 1, "tp": 2}),
    "sequence": (2, {"dp": 1, "tp": 2, "tensor": {"sequence_parallel": True}}),
    "pipeline": (2, {"dp": 1, "pp": 2}),
}


QUICK = ("one", "replicas", "zero-3", "tensor", "pipeline")


def compare(world: World, build: Callable[[], nn.Module], name: str) -> None:
    num_ranks, sections = PLANS[name]
    plan = Plan(**{"training": {"batch_size": 16}, **sections})
    profile = profile_model(build(), plan)
    table = estimate_memory(profile, plan.resolve(num_ranks), optimizer_named("AdamW"), device_type="cpu")
    measured = max(world.run(measured_peak, build, plan, num_ranks=num_ranks))
    assert table.peak_bytes == pytest.approx(measured, rel=0.06), table.peak


@pytest.mark.ranks
@pytest.mark.parametrize("name", QUICK)
def test_the_estimate_is_near_the_measured_peak(world: World, name: str) -> None:
    compare(world, char_gpt, name)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("build", "name"),
    [(char_gpt, name) for name in PLANS] + [(wide, name) for name in PLANS if name != "sequence"],
)
def test_every_estimate_is_near_the_measured_peak(world: World, build: Callable[[], nn.Module], name: str) -> None:
    compare(world, build, name)


@pytest.mark.ranks
def test_of_batches_of_different_lengths_the_longest_decides(world: World) -> None:
    plan = Plan(dp=1, training={"batch_size": 16})
    profile = profile_model(char_gpt(), plan, sequence=48)
    table = estimate_memory(profile, plan, optimizer_named("AdamW"), device_type="cpu")
    (measured,) = world.run(measured_peak_of_lengths, char_gpt, plan, (8, 48, 16, 33), num_ranks=1)
    assert table.peak_bytes == pytest.approx(measured, rel=0.06), table.peak
