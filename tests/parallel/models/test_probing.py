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
