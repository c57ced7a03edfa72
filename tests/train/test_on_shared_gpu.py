"""Every axis with several ranks on one GPU: the losses of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.bed.world import World
from tests.parallel.models.zoo import SPECIMENS
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

pytestmark = [pytest.mark.ranks, pytest.mark.needs_cuda, pytest.mark.needs_library("transformers")]

SGD = functools.partial(torch.optim.SGD, lr=0.3)
STEPS = 3
_PIPELINE = {"num_microbatches": 2}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {"mesh": {"dp": 2}}),
    "dp, compressed": (2, {"mesh": {"dp": 2}, "compress": {"method": "bf16"}}),
    "shard": (2, {"mesh": {"dp": 1, "shard": 2}}),
    "hybrid": (4, {"mesh": {"dp": 2, "shard": 2}}),
    "zero1": (2, {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}}),
    "tp": (2, {"mesh": {"dp": 1, "tp": 2}}),
    "pp": (2, {"mesh": {"dp": 1, "pp": 2}, "pipeline": _PIPELINE}),
    "pp, gpipe": (2, {"mesh": {"dp": 1, "pp": 2}, "pipeline": {**_PIPELINE, "schedule": "gpipe"}}),
    "cp": (2, {"mesh": {"dp": 1, "cp": 2}}),
    "dp x tp": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "shard x tp": (4, {"mesh": {"dp": 1, "shard": 2, "tp": 2}}),
    "tp x pp": (4, {"mesh": {"dp": 1, "tp": 2, "pp": 2}, "pipeline": _PIPELINE}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"mesh": {"dp": 1, "ep": 2}}),
    "dp x ep": (4, {"mesh": {"dp": 2, "ep": 2}}),
}


def losses(name: str, plan: dict[str, Any], device: str) -> list[float]:
    torch.manual_seed(0)
    specimen = SPECIMENS[name]
    model = specimen.build().to(device)
    engine = parallelize(model, SGD, Plan.from_dict(plan))
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    found = []
    for seed in range(STEPS):
        batch = specimen.batch(torch.Generator().manual_seed(seed))
        found.append(engine.step({key: value[rank::degree].to(device) for key, value in batch.items()}))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    """By model: the losses of one process on the CPU, without any of this."""
    found = {}
    for name in ("Llama", "Qwen3-MoE"):
        torch.manual_seed(0)
        specimen = SPECIMENS[name]
        model = specimen.build()
        optimizer = SGD(model.parameters())
        found[name] = []
        for seed in range(STEPS):
            loss = model(**specimen.batch(torch.Generator().manual_seed(seed))).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found[name].append(loss.item())
    return found


@pytest.mark.parametrize("case", PLANS)
def test_every_axis_trains_as_one_process(world: World, alone: dict[str, list[float]], case: str) -> None:
    num_ranks, plan = PLANS[case]
    for found in world.run(losses, "Llama", plan, "cuda", num_ranks=num_ranks, backend="torsh", timeout_s=100):
        assert found == pytest.approx(alone["Llama"], rel=5e-3 if "compress" in plan else 1e-4)


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_train_as_in_one_process(world: World, alone: dict[str, list[float]], case: str) -> None:
    num_ranks, plan = EXPERTS[case]
    for found in world.run(losses, "Qwen3-MoE", plan, "cuda", num_ranks=num_ranks, backend="torsh", timeout_s=100):
        assert found == pytest.approx(alone["Qwen3-MoE"], rel=1e-4)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 1, "shard": 2}], ids=["dp", "shard"])
def test_compiled_in_bf16_it_is_near(world: World, alone: dict[str, list[float]], mesh: dict[str, int]) -> None:
    plan = {"mesh": mesh, "precision": {"dtype": "bf16"}, "compile": {"enabled": True}}
    for found in world.run(losses, "Llama", plan, "cuda", num_ranks=2, backend="torsh", timeout_s=110):
        assert found == pytest.approx(alone["Llama"], rel=2e-2)
