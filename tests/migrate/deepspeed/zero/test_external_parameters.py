"""Under stage 3, modules that use the parameters of others: registered, of a leaf module, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.surface.script_helpers import set_z3_leaf_modules
from torsh_distributed.migrate.deepspeed.zero.gathered_parameters import register_external_parameter


class Products(nn.Module):
    """Computes with the parameters of its layers, without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + torch.addmm(layer.bias, inputs, layer.weight.t())  # type: ignore[arg-type, operator]  # a Linear's
        return inputs


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), Products(), nn.Linear(8, 2))


def register(model: nn.Sequential) -> None:
    for param in model[1].parameters():
        register_external_parameter(model[1], param)


def mark_as_leaf(model: nn.Sequential) -> None:
    set_z3_leaf_modules(model, [Products])


def trained(stage: int, prepare: Callable[[nn.Sequential], object]) -> list[float]:
    """Losses of training, with a forward without gradients after each update."""
    model = net()
    prepare(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    inputs, found = torch.ones(2, 8) + dist.get_rank(), []
    for _ in range(3):
        loss = (engine(inputs) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            found += [float(loss.detach()), float((engine(inputs) - 1).square().mean())]
        engine.train()
    return found


def train_in_every_way() -> None:
    """Runs on ranks."""
    expected = trained(0, len)
    for prepare in (register, mark_as_leaf):
        assert trained(3, prepare) == pytest.approx(expected, rel=1e-5), prepare.__name__
    with pytest.raises(FeatureNotAvailable, match="a module's forward used a parameter of another module") as caught:
        trained(3, len)
    assert "register_external_parameter" in str(caught.value)


@pytest.mark.ranks
def test_parameters_that_others_use_are_gathered_for_them(world: World) -> None:
    assert world.run(train_in_every_way, num_ranks=2, backend="torsh", timeout_s=80) == [None, None]
