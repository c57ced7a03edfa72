"""Gradient hooks of scripts see what they see under DeepSpeed: a rank's own gradient, in every backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate import deepspeed

RATE, LIMIT, COUNT = 0.1, 0.05, 2


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def halved(gradient: Tensor) -> Tensor:
    return gradient * torch.linspace(0, 1, gradient.shape[0])[:, None]


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    loss: Tensor = (model(inputs(step, rank)) - 1).square().mean()
    return loss


def by_hand(num_ranks: int, num_steps: int) -> list[Tensor]:
    """The parameters after some updates: each microbatch of each rank goes through the hooks by itself."""
    model = net()
    for step in range(num_steps):
        sums = [torch.zeros_like(param) for param in model.parameters()]
        for microbatch in range(COUNT):
            for rank in range(num_ranks):
                loss = loss_of(model, COUNT * step + microbatch, rank) / COUNT
                gradients = list(torch.autograd.grad(loss, list(model.parameters())))
                gradients[0], gradients[2] = limited(gradients[0]), halved(gradients[2])
                for total, gradient in zip(sums, gradients, strict=True):
                    total.add_(gradient / num_ranks)
        with torch.no_grad():
            for param, total in zip(model.parameters(), sums, strict=True):
                param.sub_(RATE * total)
    return [param.detach() for param in model.parameters()]


def made(stage: int, model: nn.Module) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=config)[0]


def train_with_hooks() -> None:
    """One hook from before `initialize`, one from after it, one that is taken away; runs on ranks."""
    expected = by_hand(dist.get_world_size(), 3)
    for stage in range(4):
        model = net()
        model[0].weight.register_hook(limited)
        removed = model[0].bias.register_hook(torch.zeros_like)
        engine = made(stage, model)
        removed.remove()
        engine.module[2].weight.register_hook(halved)
        for step in range(3 * COUNT):
            engine.backward(loss_of(engine, step, dist.get_rank()))
            engine.step()
        for (name, value), wanted in zip(engine.module_state_dict().items(), expected, strict=True):
            torch.testing.assert_close(value, wanted, msg=lambda text, at=(stage, name): f"{at}: {text}")


@pytest.mark.ranks
def test_hooks_change_the_gradient_of_each_rank_and_microbatch(world: World) -> None:
    assert world.run(train_with_hooks, num_ranks=2, backend="torsh", timeout_s=80) == [None, None]


def hook_that_gets_a_shard() -> str:
    """On ranks: a hook that would get the parameter, which no backward reaches."""
    engine = made(3, net())
    engine.module[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(FeatureNotAvailable) as caught:
        engine(inputs(0, dist.get_rank()))
    return str(caught.value)


@pytest.mark.ranks
def test_a_hook_that_would_never_be_called_is_refused(world: World) -> None:
    for text in world.run(hook_that_gets_a_shard, num_ranks=2, backend="torsh", timeout_s=60):
        assert "register_post_accumulate_grad_hook() on a sharded parameter would never be called" in text
