"""Forwards that only look change nothing: not the buffers, not what a graph has kept of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torsh_distributed.parallel.models.probing import probing


class Masked(nn.Module):
    """Counts its forwards in one buffer, and multiplies with another, which backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> Tensor:
        self.count += 1
        return (self.weight * self.mask).sum()


def test_what_forward_changed_is_restored() -> None:
    model = Masked()
    with probing(model):
        model()
    assert model.count == 0


def test_a_probe_between_forward_and_backward_does_not_spoil_the_graph() -> None:
    model = Masked()
    loss = model()
    with probing(model):
        model()
    loss.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [1, 0, 1]
    assert model.count == 1


class Renewed(nn.Module):
    """Gives its buffer another tensor in every forward, counts calls and scales its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.register_buffer("mean", torch.zeros(3))
        self.num_calls = 0

    def forward(self) -> Tensor:
        self.num_calls += 1
        self.mean = 0.9 * self.mean + 0.1 * self.weight.detach()
        self.weight.data = self.weight.data / 2
        return self.weight.sum()


def test_statistics_of_a_native_batch_norm_are_restored_bit_by_bit() -> None:
    """Its kernel writes into them without counting a version."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model(torch.randn(5, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with probing(model):
        model(torch.full((5, 4), float("inf")))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_buffer_that_forward_replaced_and_what_it_counted_are_restored() -> None:
    model = Renewed()
    buffer, weight = model.mean, model.weight
    with probing(model, keeps_params=True):
        model()
    assert model.mean is buffer
    assert model.mean.tolist() == [0, 0, 0]
    assert model.num_calls == 0
    assert model.weight is weight
    assert model.weight.tolist() == [0, 1, 2]
