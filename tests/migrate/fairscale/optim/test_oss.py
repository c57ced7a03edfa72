"""OSS: state that any number of ranks can load, groups that come later, and settings that schedulers change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR

from tests.bed.world import World
from torsh_distributed.migrate.fairscale.optim.adascale import AdaScale
from torsh_distributed.migrate.fairscale.optim.oss import OSS


def params(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4 + index, 3)) for index in range(count)]


def fill(given: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(given):
        param.grad = torch.full_like(param, float(index + step + 1))


def train(state: dict[str, Any] | None) -> tuple[dict[str, Any], list[float], bool]:
    """Three steps from a state or from none; the whole state on rank 0, and what the parameters sum to."""
    given = params(5)
    optimizer = OSS(given[:3], optim=Adam, lr=0.1)
    optimizer.add_param_group({"params": given[3:], "lr": 0.2})
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(3):
        fill(given, step)
        optimizer.step()
    optimizer.consolidate_state_dict()
    has_state = True
    try:
        whole = optimizer.state_dict()
    except RuntimeError:
        has_state, whole = False, {}
    owned = sum(len(group["params"]) for group in optimizer.optim.param_groups)
    assert len(optimizer.optim.state) == owned, "each rank keeps the state of its own parameters"
    return whole, [param.sum().item() for param in given], has_state


def test_a_state_of_two_ranks_is_that_of_a_plain_optimizer_and_loads_on_three(world: World) -> None:
    (state, sums, has_state), (_, other_sums, other_has) = world.run(train, None)
    assert (has_state, other_has) == (True, False)
    given = params(5)
    plain = Adam([{"params": given[:3]}, {"params": given[3:], "lr": 0.2}], lr=0.1)
    for step in range(3):
        fill(given, step)
        plain.step()
    expected = plain.state_dict()
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        torch.testing.assert_close(state["state"][index], values)
    torch.testing.assert_close(sums, [param.sum().item() for param in given])
    assert sums == other_sums
    assert [group["lr"] for group in state["param_groups"]] == [0.1, 0.2]
    plain = Adam([{"params": params(3)}, {"params": params(2), "lr": 0.2}], lr=0.1)
    again = world.run(train, expected, num_ranks=3)[0][0]
    assert float(again["state"][4]["step"]) == 6


def schedule() -> list[float]:
    given = params(3)
    optimizer = OSS(given, optim=SGD, lr=0.1, momentum=0.9)
    rates = OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    scaled = AdaScale(OSS(params(2), optim=SGD, lr=0.5), scale=2.0)
    assert scaled.state_dict is not None
    fill(given, 0)
    optimizer.step()
    rates.step()
    return [optimizer.optim.param_groups[0]["lr"], optimizer.param_groups[0]["lr"], scaled.gain(), dist.get_rank()]


def test_schedulers_reach_the_inner_optimizer_at_the_next_step(world: World) -> None:
    for inner, outer, gain, _ in world.run(schedule):
        assert inner < outer
        assert gain == 1.0


def test_adascale_needs_two_gradients() -> None:
    with pytest.raises(RuntimeError, match="single worker"):  # as FairScale raises it
        AdaScale(SGD(params(1), lr=0.1), world_size=1)
