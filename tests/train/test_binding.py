"""The optimizer follows the model to its final parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.state.whole_state import (
    model_state,
    optimizer_state,
)
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.binding import prepare_optimizer, refuse_step_hooks


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


def follow(num_steps_before: int) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Adam steps before the parameters are sharded, and after; two groups, odd shapes."""
    model = make()
    optimizer = groups_of(model)
    for seed in range(num_steps_before):
        step(model, optimizer, seed)
    optimizer_for = prepare_optimizer(model, optimizer)
    bound = optimizer_for(spread(model))
    assert bound is optimizer
    for seed in range(num_steps_before, 6):
        step(model, bound, seed)
    return model_state(model), optimizer_state(model, bound)


@pytest.mark.parametrize("num_steps_before", [0, 3])
def test_an_optimizer_goes_on_over_sharded_parameters_with_its_state(world: World, num_steps_before: int) -> None:
    plain = make()
    optimizer = groups_of(plain)
    for seed in range(6):
        step(plain, optimizer, seed)
    for state, optimizer_values in world.run(follow, num_steps_before):
        torch.testing.assert_close(state, plain.state_dict())
        expected = optimizer_state(plain, optimizer)
        torch.testing.assert_close(optimizer_values["state"], expected["state"])
        assert optimizer_values["param_groups"] == expected["param_groups"]


def test_a_function_is_called_with_the_final_parameters() -> None:
    model = make()
    optimizer_for = prepare_optimizer(model, functools.partial(torch.optim.SGD, lr=0.5))
    model[0] = nn.Linear(5, 7)  # stands for a strategy that replaces parameters
    made = optimizer_for(model)
    assert made.param_groups[0]["params"][0] is model[0].weight
    assert made.defaults["lr"] == 0.5


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("foreign", "holds none of"),
        ("more", "not the model's"),
        ("frozen", "no parameter"),
        ("function", "must be a"),
        ("loss", "not the model's"),
    ],
)
def test_what_cannot_train_the_model_is_refused(case: str, message: str) -> None:
    model = make()
    loose = nn.Parameter(torch.zeros(1))
    given = {
        "foreign": torch.optim.SGD(make().parameters(), lr=0.1),
        "more": torch.optim.SGD([*model.parameters(), loose], lr=0.1),
        "frozen": torch.optim.SGD(model.parameters(), lr=0.1),
        "function": list,
        "loss": lambda params: torch.optim.SGD([*params, loose], lr=0.1),
    }[case]
    if case == "frozen":
        model.requires_grad_(False)
    with pytest.raises(InvalidArgument, match=message):
        prepare_optimizer(model, given)(model)  # type: ignore[arg-type]


def test_a_parameter_of_another_shape_cannot_be_followed() -> None:
    model = make()
    optimizer_for = prepare_optimizer(model, groups_of(model))
    model[0] = nn.Linear(5, 3)
    with pytest.raises(InvalidArgument, match=r"cannot follow 0\.weight"):
        optimizer_for(model)


@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"tp": 2}},
        {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
        {"offload": {"enabled": True}},
    ],
    ids=["tp", "zero 1", "offload"],
)
def test_a_step_hook_that_would_see_pieces_is_refused(sections: dict[str, dict[str, object]]) -> None:
    optimizer = torch.optim.SGD(make().parameters(), lr=0.1)
    refuse_step_hooks(optimizer, Plan(**sections))  # type: ignore[arg-type]  # sections by name
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="step hook"):
        refuse_step_hooks(optimizer, Plan(**sections))  # type: ignore[arg-type]  # as above
    for accepted in (Plan(), Plan(mesh={"shard": 2})):
        refuse_step_hooks(optimizer, accepted)


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
}
SHARDS = {"full": "full_shard", "zero1": "shard_optimizer"}


def losses_of(name: str, strategy: str | None) -> list[float]:
    """Of one process without our code if there is no strategy."""
    model, generator = make(), torch.Generator().manual_seed(2)
    batches = [(torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(3)]
    loss_fn = nn.functional.mse_loss
    if strategy is not None:
        plan = Plan.model_validate({"mesh": {"shard": 2}, "fsdp": {"strategy": strategy}, "training": {"steps": 3}})
        engine = parallelize(model, FUSED[name], plan, loss_fn=loss_fn)
        return [engine.step(batch) for batch in engine.batches(batches)]
    optimizer, losses = FUSED[name](model.parameters()), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("name", FUSED)
def test_an_optimizer_whose_fused_kernel_knows_no_shards_trains_without_it(
    world: World, name: str, strategy: str
) -> None:
    for losses in world.run(losses_of, name, strategy):
        assert losses == pytest.approx(losses_of(name, None), rel=1e-5)
