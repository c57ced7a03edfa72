"""The Engine to the golden losses, state from one strategy to another, and torch's own wrappers beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.bed.world import World
from tests.parallel.golden import CLIP, MODELS, STEPS, golden, make_optimizer
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize


def engine_for(name: str, sections: dict[str, Any], accumulation: int = 1) -> Engine:
    make, _, loss_fn = MODELS[name]
    training = {"steps": STEPS, "gradient_clipping": CLIP, "gradient_accumulation": accumulation}
    plan = Plan.from_dict({"ddp": {"find_unused_parameters": True}, **sections, "training": training})
    model = make()
    return parallelize(model, make_optimizer(model), plan, loss_fn=loss_fn)


def losses_of(name: str) -> list[float]:
    engine = engine_for(name, {}, accumulation=2)
    return [engine.step(batch) for batch in engine.batches(MODELS[name][1])]


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("odd", 1), ("odd", 2), ("mlp", 4), pytest.param("gpt", 4, marks=pytest.mark.matrix)]
)
def test_losses_are_the_golden_ones(world: World, name: str, num_ranks: int) -> None:
    expected = [loss for loss, _ in golden(name)]
    for losses in world.run(losses_of, name, num_ranks=num_ranks, timeout_s=60):
        assert losses == pytest.approx(expected, abs=1e-4)


def some_steps(
    sections: dict[str, Any], state: dict[str, Any] | None, until: int
) -> tuple[list[float], dict[str, Any]]:
    engine = engine_for("odd", sections)
    if state is not None:
        engine.load_state_dict(state)
    losses = []
    for batch in engine.batches(MODELS["odd"][1]):
        losses.append(engine.step(batch))
        if engine.num_steps == until:
            break
    return losses, engine.state_dict()


def test_state_goes_from_replicas_to_shards_and_back_at_other_world_sizes(world: World) -> None:
    """Tied, frozen, unused and scalar parameters; two groups of AdamW."""
    sharded = {"mesh": {"shard": -1}, "fsdp": {"strategy": "full_shard"}}
    losses: list[float] = []
    state: dict[str, Any] | None = None
    for sections, num_ranks, until in (({}, 2, 6), (sharded, 3, 12), ({}, 1, STEPS)):
        found, state = world.run(some_steps, sections, state, until, num_ranks=num_ranks, timeout_s=60)[0]
        losses += found
    assert losses == pytest.approx([loss for loss, _ in golden("odd")], abs=1e-4)


def plain_torch(kind: str) -> list[float]:
    """No Engine, no plan: torch's own wrappers on our default backend."""
    make, batches, loss_fn = MODELS["mlp"]
    model = make()
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = make_optimizer(model)
    losses = []
    for batch in batches:
        inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
        loss = loss_fn(wrapped(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_a_plain_torch_loop_works_beside_the_engine(world: World, kind: str) -> None:
    for losses in world.run(plain_torch, kind, backend="torsh", timeout_s=60):
        assert losses == pytest.approx([loss for loss, _ in golden("mlp")], abs=1e-4)


def sharded_in_fp16(init_loss_scale: float) -> tuple[list[float], int, float | None]:
    sections = {
        "mesh": {"shard": -1},
        "fsdp": {"strategy": "full_shard"},
        "precision": {"dtype": "fp16", "init_loss_scale": init_loss_scale},
    }
    engine = engine_for("mlp", sections, accumulation=2)
    losses = [engine.step(batch) for batch in engine.batches(MODELS["mlp"][1])]
    return losses, engine.num_skipped, engine.precision.loss_scale


@pytest.mark.matrix
def test_shards_in_fp16_skip_together_and_stay_close(world: World) -> None:
    """The bound of fp16 is 0.003; the second run begins with a loss scale that is far too large."""
    for losses, num_skipped, _ in world.run(sharded_in_fp16, 65536.0, backend="torsh", timeout_s=60):
        assert losses == pytest.approx([loss for loss, _ in golden("mlp")], abs=0.003)
        assert num_skipped == 0
    first, second = world.run(sharded_in_fp16, 2.0**26, backend="torsh", timeout_s=60)
    assert first == second
    assert first[1] > 0
    assert first[2] == 2.0 ** (26 - first[1])
