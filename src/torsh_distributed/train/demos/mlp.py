"""An MLP that separates five interleaved spirals: trains in a second, and no linear model can do it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from torsh_distributed.plan import TrainingConfig
from torsh_distributed.train.demos.base import Demo

NUM_CLASSES = 5


def spirals(num_per_class: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Points (num, 2) along NUM_CLASSES spirals with a little noise, and their class (num,)."""
    generator = torch.Generator().manual_seed(seed)
    radius = torch.linspace(0.05, 1, num_per_class)
    points, labels = [], []
    for label in range(NUM_CLASSES):
        noise = 0.15 * torch.randn(num_per_class, generator=generator)
        angle = radius * 5 + 2 * torch.pi * label / NUM_CLASSES + noise
        points.append(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))
        labels.append(torch.full((num_per_class,), label))
    return torch.cat(points), torch.cat(labels)


def build(training: TrainingConfig) -> Demo:
    """The demo with the batch size, learning rate and seed of a plan."""
    points, labels = spirals(400, seed=training.seed)
    torch.manual_seed(training.seed)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))

    @torch.no_grad()
    def accuracy(trained: nn.Module, device: torch.device) -> str:
        share = (trained(points.to(device)).argmax(dim=1).cpu() == labels).float().mean()
        return f"{share:.1%} of the points are in the right class"

    return Demo(
        name="mlp",
        description=f"MLP on {len(points):,} points of {NUM_CLASSES} spirals",
        model=model,
        loader=DataLoader(TensorDataset(points, labels), batch_size=training.batch_size, shuffle=True, drop_last=True),
        loss_fn=functional.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=training.learning_rate),
        sample=accuracy,
    )
