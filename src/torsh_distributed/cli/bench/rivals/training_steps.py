"""The training step that `ddp` and `fsdp` measure."""

from __future__ import annotations

import torch
from torch import nn

from torsh_distributed.cli.bench.rivals.side_by_side import Workload
from torsh_distributed.comm.groups import process_group

NUM_LAYERS = 8
_BATCH = 8


def layers(width: int) -> nn.Sequential:
    """The same weights on every rank and for every contestant."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS))).to(process_group.device())


def describe_layers(width: int) -> str:
    """Its size, for a row's name."""
    return f"{NUM_LAYERS * (width * width + width) / 1e6:.1f} M parameters"


def step_of(model: nn.Module, width: int) -> Workload:
    """Forward, backward and an SGD update on a batch of this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(_BATCH, width, device=process_group.device())

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
