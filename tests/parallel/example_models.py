"""A small model, its data, and how ranks share them, for the tests of data parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.plan import DdpConfig

NUM_STEPS, NUM_SAMPLES = 4, 24
SMALL = DdpConfig(max_bucket_size_mb=0.02, min_bucket_size_mb=0.005)  # several buckets


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.BatchNorm1d(64, momentum=0.5), nn.Linear(64, 64), nn.Linear(64, 1)
    )


def data(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    points = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(1))
    return points, points.sum(dim=1, keepdim=True).tanh()


def share(num_micro: int = 1) -> list[tuple[Tensor, Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    points, targets = data()
    return list(zip(points[rank::size].chunk(num_micro), targets[rank::size].chunk(num_micro), strict=True))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch


def steps_of_one_process(num_parts: int, *, num_micro: int = 1) -> list[Tensor]:
    """The parameters after each step; parts as ranks would have them in turn, for batch normalisation's sake."""
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    points, targets = data()
    found = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(num_parts * num_micro):
            rank, micro = part % num_parts, part // num_parts
            rows = slice(rank, None, num_parts)
            x, y = points[rows].chunk(num_micro)[micro], targets[rows].chunk(num_micro)[micro]
            backward(nn.functional.mse_loss(model(x), y) / num_parts / num_micro)
        optimizer.step()
        found.append(flat(model))
    return found


def in_turn(*parts: Callable[[], None]) -> None:
    for part in parts:
        part()
