"""Handwritten digits (scikit-learn's, no download) on clients whose data differ.

    torsh federated simulate examples/federated/digits.py --clients 100

Needs scikit-learn: pip install scikit-learn
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torsh_distributed.federated import FedAvgM, FederatedConfig, FederatedTask, dirichlet_parts

NUM_TEST = 360


class Samples:
    """Images and labels of one client."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)


class Digits(FederatedTask):
    """A small classifier; each client has mostly a few of the ten digits."""

    config = FederatedConfig(rounds=15, clients_per_round=10, local_epochs=3, strategy=FedAvgM(momentum=0.5))

    def __init__(self) -> None:
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.test = Samples(images[order[:NUM_TEST]], labels[order[:NUM_TEST]])
        self.training = Samples(images[order[NUM_TEST:]], labels[order[NUM_TEST:]])

    def model(self) -> nn.Module:
        """64 pixels to 10 digits."""
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def partition(self, num_clients: int) -> Sequence[Samples]:
        """Clients with different shares of each digit; every client has at least one sample."""
        parts = dirichlet_parts(self.training.labels.tolist(), num_clients, alpha=1.0)
        return [self._part(positions or [index]) for index, positions in enumerate(parts)]

    def device_data(self, device: str) -> Samples:
        """The part of ten that the number at the end of the device's name says."""
        return self.partition(10)[int(device.rpartition("-")[2]) % 10]

    def _part(self, positions: list[int]) -> Samples:
        return Samples(self.training.images[positions], self.training.labels[positions])

    def train(self, model: nn.Module, data: Samples, epochs: int) -> Mapping[str, float]:
        """An ordinary loop."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        losses = []
        for _ in range(epochs):
            for positions in torch.randperm(len(data)).split(16):
                loss = cross_entropy(model(data.images[positions]), data.labels[positions])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return {"loss": sum(losses) / len(losses)}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """On images that no client has."""
        scores = model(self.test.images)
        accuracy = (scores.argmax(dim=1) == self.test.labels).float().mean().item()
        return {"accuracy": accuracy, "loss": cross_entropy(scores, self.test.labels).item()}
