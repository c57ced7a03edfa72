"""A model whose forward does not fit the split of its layers is named before the first step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import MeshConfig, Plan, TensorConfig
from torsh_distributed.train import parallelize

EXAMPLE = (torch.linspace(-1, 1, 32).view(2, 16),)
SPLIT = ("blocks.*.up=column_local", "blocks.*.down=row")


class Block(nn.Module):
    """Two layers that are split; what is between them differs."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.between = between

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(self.between(self.up(hidden)))
        return out


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(between) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def in_fours(hidden: Tensor) -> Tensor:
    return hidden.view(2, 16, 4).relu().flatten(1)


def normal(hidden: Tensor) -> Tensor:
    return nn.functional.layer_norm(hidden, hidden.shape[-1:])


def what_happens(between: Callable[[Tensor], Tensor], overrides: tuple[str, ...]) -> str | float:
    """The loss of a step on two ranks, or the refusal."""
    torch.manual_seed(0)
    model = Net(between)
    plan = Plan(mesh=MeshConfig(dp=1, tp=2), tensor=TensorConfig(overrides=overrides))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        engine = parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss, example=EXAMPLE)
    except ConfigurationError as error:
        return str(error)
    return engine.step((EXAMPLE[0], torch.zeros(2, 16)))


def loss_alone(between: Callable[[Tensor], Tensor]) -> float:
    torch.manual_seed(0)
    return nn.functional.mse_loss(Net(between)(*EXAMPLE), torch.zeros(2, 16)).item()


def test_a_reshape_that_needs_the_whole_layer_is_named_with_what_to_write(world: World) -> None:
    said = world.run(what_happens, in_fours, SPLIT, num_ranks=2, backend="torsh", timeout_s=60)
    for refusal in said:
        assert "Net cannot run once mesh.tp 2 has split it: blocks.0 says" in str(refusal)
        assert 'tensor.overrides = ["blocks.*.*=replicated"]' in str(refusal)


def test_a_result_that_differs_is_refused(world: World) -> None:
    """A norm over a rank's half is another norm: nothing raises, and the losses would be wrong."""
    said = world.run(what_happens, normal, SPLIT, num_ranks=2, backend="torsh", timeout_s=60)
    for refusal in said:
        assert "Net does not compute the same once mesh.tp 2 has split its layers" in str(refusal)


def test_what_fits_trains(world: World) -> None:
    said = world.run(what_happens, torch.relu, SPLIT, num_ranks=2, backend="torsh", timeout_s=60)
    assert said == pytest.approx([loss_alone(torch.relu)] * 2, rel=1e-5)


class Pictures(Net):
    """Says what its inputs are, so that an example can be made; rank 1 cannot run it as a whole."""

    main_input_name = "pixel_values"
    config = SimpleNamespace(image_size=(2, 16), num_channels=1)

    def __init__(self) -> None:
        super().__init__(only_in_halves_on_rank_1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(pixel_values)


def only_in_halves_on_rank_1(hidden: Tensor) -> Tensor:
    if dist.get_rank() == 1 and hidden.shape[-1] == 64:
        raise OSError("no memory for all of it")
    return hidden.relu()


def step_of_pictures() -> float:
    torch.manual_seed(0)
    model = Pictures()
    plan = Plan(mesh=MeshConfig(dp=1, tp=2), tensor=TensorConfig(overrides=SPLIT))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
    return engine.step((EXAMPLE[0], torch.zeros(2, 16)))


def test_ranks_compare_only_if_all_of_them_can(world: World) -> None:
    """Rank 0 alone would wait for the others in the split model."""
    said = world.run(step_of_pictures, num_ranks=2, backend="torsh", timeout_s=60)
    assert said == pytest.approx([loss_alone(torch.relu)] * 2, rel=1e-5)
