"""State as whole tensors by name: saved at one world size, loaded at another."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.whole_state import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def groups_of(model: nn.Sequential) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[2].parameters()}], lr=0.01
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def spread(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained_shards() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    model = make()
    optimizer = groups_of(spread(model))
    for seed in range(6):
        step(model, optimizer, seed)
    return model_state(model), optimizer_state(model, optimizer)


def resume_sharded(state: dict[str, torch.Tensor], optimizer_values: dict[str, object]) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = groups_of(spread(model))
    load_model_state(model, state)
    load_optimizer_state(model, optimizer, optimizer_values)
    step(model, optimizer, 6)
    return model_state(model)


def test_whole_state_is_cut_for_another_number_of_ranks(world: World) -> None:
    [(state, optimizer_values), _] = world.run(trained_shards)
    plain = make()
    optimizer = groups_of(plain)
    for seed in range(7):
        step(plain, optimizer, seed)
    for found in world.run(resume_sharded, state, optimizer_values, num_ranks=3):
        torch.testing.assert_close(found, plain.state_dict())


def test_state_of_another_model_is_refused_by_name() -> None:
    state = model_state(make())
    with pytest.raises(InvalidArgument, match=re.escape("names differ")):
        load_model_state(nn.Sequential(nn.Linear(5, 7)), state)
    with pytest.raises(InvalidArgument, match=r"2\.weight differs(?s:.*)\(3, 7\)(?s:.*)\(4, 7\)"):
        load_model_state(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)), state | {"2.bias": torch.ones(4)})
    model = make()
    values = optimizer_state(model, groups_of(model))
    with pytest.raises(InvalidArgument, match="other parameters or groups"):
        load_optimizer_state(model, torch.optim.AdamW(model.parameters()), values)
