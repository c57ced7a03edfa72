"""Hooks of the user on parameters: under every plan they see the gradient that one process has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

NUM_STEPS, ROWS = 3, 8
PLANS: dict[str, dict[str, Any]] = {
    "dp": {},
    "accumulated": {"training": {"gradient_accumulation": 2}},
    "clipped": {"training": {"gradient_clipping": 0.05}},
    "shard": {"mesh": {"shard": 2}},
    "zero1": {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}},
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.first = nn.Linear(6, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.last = nn.Linear(12, 3)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values).tanh()
        return self.last(hidden + self.down(self.up(hidden).relu()))


def first_rows_frozen(gradient: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(gradient[:5]), gradient[5:]])


def signs(gradient: Tensor) -> Tensor:
    return 0.01 * gradient.sign()


def not_called(gradient: Tensor) -> Tensor:
    raise AssertionError("autograd has no gradient for it")


def made() -> Small:
    torch.manual_seed(3)
    return Small()


def add_hooks(model: nn.Module) -> None:
    """Hooks that need all rows, and the sign of the sum over all samples; one is removed again."""
    params = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    params["up.weight"].register_hook(first_rows_frozen)
    params["up.weight"].register_hook(signs)
    params["last.bias"].register_hook(signs)
    params["first.weight"].register_hook(torch.zeros_like).remove()
    params["unused.weight"].register_hook(not_called)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(ROWS, 6, generator=generator) for _ in range(NUM_STEPS)]
    return [(one, one[:, :3].sin()) for one in values]


def alone(clipping: float | None) -> list[float]:
    model = made()
    add_hooks(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2, eps=0.1)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        if clipping is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(plan: dict[str, Any], *, is_late: bool = False) -> list[float]:
    model = made()
    if not is_late:
        add_hooks(model)
    engine = parallelize(
        model,
        lambda params: torch.optim.Adam(params, lr=0.2, eps=0.1),
        Plan(**{**plan, "training": {"batch_size": ROWS, "steps": NUM_STEPS, **plan.get("training", {})}}),
        loss_fn=functional.mse_loss,
    )
    if is_late:
        add_hooks(engine.unwrapped)
    return [engine.step(batch) for batch in engine.batches(batches())]


def trained_by_all() -> dict[str, list[float]]:
    losses = {name: trained(plan) for name, plan in PLANS.items()}
    return losses | {f"{name}, late": trained(PLANS[name], is_late=True) for name in ("dp", "shard")}


@pytest.mark.ranks
def test_hooks_see_the_gradient_of_one_process(world: World) -> None:
    expected, clipped = alone(None), alone(PLANS["clipped"]["training"]["gradient_clipping"])
    assert clipped != pytest.approx(expected, rel=1e-3)
    for losses in world.run(trained_by_all, num_ranks=2):
        for plan, found in losses.items():
            assert found == pytest.approx(clipped if plan == "clipped" else expected, rel=1e-5), plan


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5).clamp_(-1e-3, 1e-3)


def trained_after_accumulation(plan: dict[str, Any]) -> tuple[list[float], list[float]]:
    model, engine_model = made(), made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2, eps=0.1)
    expected = []
    for one in (model, engine_model):
        one.up.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]  # untyped in torch
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    engine = parallelize(
        engine_model,
        lambda params: torch.optim.Adam(params, lr=0.2, eps=0.1),
        Plan(training={"batch_size": ROWS, "steps": NUM_STEPS}, **plan),
        loss_fn=functional.mse_loss,
    )
    return [engine.step(batch) for batch in engine.batches(batches())], expected


@pytest.mark.ranks
def test_hooks_on_parameters_run_on_whole_ones_and_are_refused_on_parts(world: World) -> None:
    for found, expected in world.run(trained_after_accumulation, {}, num_ranks=2):
        assert found == pytest.approx(expected, rel=1e-5)
    refused = {
        "up.weight has a hook": {"mesh": {"shard": 2}},
        "offload takes gradients away": {"mesh": {"dp": 2}, "offload": {"enabled": True}},
    }
    for said, plan in refused.items():
        for outcome in world.outcomes(trained_after_accumulation, plan, num_ranks=2):
            assert isinstance(outcome.error, ConfigurationError)
            assert said in str(outcome.error)


def trained_with_a_hook_on_one_rank() -> None:
    model = made()
    if process_group.rank() == 0:
        model.up.weight.register_hook(signs)
    engine = parallelize(
        model,
        lambda params: torch.optim.Adam(params, lr=0.2),
        Plan(training={"batch_size": ROWS, "steps": 1}),
        loss_fn=functional.mse_loss,
    )
    with pytest.raises(InvalidArgument, match=r"up.weight has a gradient hook on some ranks and none on others"):
        engine.step(next(iter(engine.batches(batches()))))


@pytest.mark.ranks
def test_a_hook_that_others_lack_is_refused(world: World) -> None:
    world.run(trained_with_a_hook_on_one_rank, num_ranks=2)
