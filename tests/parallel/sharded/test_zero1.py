"""ZeRO-1: whole replicas, sharded optimizer state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

WIDTH = 64


def even() -> nn.Sequential:
    """Four layers whose rows divide by 2 and 4, so that theory needs no rounding."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def optimizer_bytes_of_replicas() -> tuple[int, int]:
    model = even()
    plan = Plan.from_dict({"mesh": {"dp": 1, "shard": -1}, "fsdp": {"strategy": "shard_optimizer"}})
    engine = parallelize(model, torch.optim.Adam(model.parameters()), plan, loss_fn=nn.functional.mse_loss)
    engine.step((torch.randn(4, WIDTH), torch.randn(4, WIDTH)))
    state = [value for one in engine.optimizer.state.values() for key, value in one.items() if key != "step"]
    held = sum(value.to_local().untyped_storage().nbytes() for value in state)
    return held, sum(param.numel() * 4 for param in model.parameters())


def test_replicas_hold_a_share_of_the_optimizer_state(world: World) -> None:
    for held, whole in world.run(optimizer_bytes_of_replicas, num_ranks=4, backend="torsh"):
        assert held == 2 * whole / 4


def step_with_closure() -> None:
    plan = Plan.from_dict({"mesh": {"dp": 1, "shard": -1}, "fsdp": {"strategy": "shard_optimizer"}})
    engine = parallelize(even(), lambda params: torch.optim.SGD(params, lr=0.1), plan)
    with pytest.raises(InvalidArgument, match="takes no closure"):
        engine.optimizer.step(lambda: 0.0)


def test_a_closure_is_refused(world: World) -> None:
    world.run(step_with_closure)


def train_sparse() -> None:
    plan = Plan.from_dict({"mesh": {"dp": 1, "shard": -1}, "fsdp": {"strategy": "shard_optimizer"}})
    with pytest.raises(InvalidArgument, match="gradients of 0 are sparse"):
        parallelize(nn.Sequential(nn.Embedding(8, 4, sparse=True)), torch.optim.SGD, plan)


def test_sparse_gradients_are_refused(world: World) -> None:
    world.run(train_sparse)
