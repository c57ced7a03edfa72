"""A task for tests: three classes of points, clients of different sizes with data that differ, no random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torsh_distributed.federated import FederatedTask


class Points:
    """Of one client."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)


class SmallTask(FederatedTask):
    """Keeps the weights after each round, for comparisons."""

    def __init__(self, *, rate: float = 0.1, momentum: float = 0.0) -> None:
        self.rate, self.momentum = rate, momentum
        self.seen: list[Tensor] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def partition(self, num_clients: int) -> Sequence[Points]:
        generator = torch.Generator().manual_seed(7)
        parts = []
        for client in range(num_clients):
            size = 4 + 3 * client
            images = torch.randn(size, 5, generator=generator) + client / num_clients
            labels = (torch.randint(3, (size,), generator=generator) + (images[:, 0] > 0.5)) % 3
            parts.append(Points(images, labels))
        return parts

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate, momentum=self.momentum)
        for _ in range(epochs):
            for images, labels in batches(data):
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
        return {"loss": loss.item()}

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        self.seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        return {"norm": self.seen[-1].norm().item()}


def batches(data: Points) -> list[tuple[Tensor, Tensor]]:
    """Four samples each, in order."""
    return list(zip(data.images.split(4), data.labels.split(4), strict=True))
