"""FairScale's `checkpoint_wrapper`: a module can tell which forward it is in, and recomputing can be switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_distributed.migrate.fairscale.recomputing import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)


class Noted(nn.Module):
    """Notes in which kind of forward it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[str] = []

    def forward(self, value: Tensor) -> Tensor:
        self.seen.append("again" if is_recomputing() else "first" if is_checkpointing() else "kept")
        out: Tensor = self.layer(value).tanh()
        return out


def run(module: nn.Module) -> Tensor:
    value = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_(True)
    module(value).square().sum().backward()
    assert value.grad is not None
    return value.grad


@pytest.mark.parametrize("argument", [False, True, {}])
def test_a_wrapped_module_runs_again_in_backward_and_knows_it(argument: Any) -> None:
    torch.manual_seed(0)
    module = Noted()
    wanted = run(module)
    wrapped = checkpoint_wrapper(nn.Sequential(module), argument)
    torch.testing.assert_close(run(wrapped), wanted)
    assert module.seen == ["kept", "first", "again"]
    with torch.no_grad():
        wrapped(torch.zeros(2, 3))
    assert module.seen[3:] == ["kept"]


def test_recomputing_can_be_switched_off_for_a_while() -> None:
    torch.manual_seed(0)
    module = Noted()
    wrapped = checkpoint_wrapper(nn.Sequential(module))
    with disable_checkpointing():
        run(wrapped)
    assert module.seen == ["kept"]
    run(wrapped)
    assert module.seen == ["kept", "first", "again"]


def test_wrapped_modules_inside_wrapped_modules_count_too() -> None:
    torch.manual_seed(0)
    inner = Noted()
    outer = checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(inner)))
    run(outer)
    assert (inner.seen[0], {*inner.seen[1:]}) == ("first", {"again"})
