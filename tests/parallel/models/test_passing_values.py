"""A model on the meta device runs on values that its modules have only while they are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torsh_distributed.parallel.models.passing_values import passing_values, run_device

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.held = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.held = sum(not param.is_meta for param in self.parameters())
        out: Tensor = self.norm(self.second(hidden).relu())
        return out


def test_values_come_with_a_call_and_go_with_it() -> None:
    with torch.device("meta"):
        net = Net().eval()
    before = dict(net.named_parameters())
    assert run_device(net).type == "meta"
    with passing_values(net, CPU), torch.no_grad():
        assert run_device(net) == CPU
        first, second = net(torch.ones(2, 4)), net(torch.ones(2, 4))
        other = net(torch.full((2, 4), 2.0))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)
    assert net.held == 0, "between two calls no module holds any"
    assert all(param is before[name] for name, param in net.named_parameters())
    assert all(buffer.is_meta for buffer in net.buffers())
    assert not net.first._forward_pre_hooks


class Reads(Net):
    """Reads a weight without calling the module that has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.second.weight.T


def test_a_weight_that_is_read_from_outside_has_no_value() -> None:
    with torch.device("meta"):
        net = Reads()
    with passing_values(net, CPU), pytest.raises(RuntimeError):
        net(torch.ones(2, 4))
    assert all(param.is_meta for param in net.parameters())
