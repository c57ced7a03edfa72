"""What every library does in a round, with code of its own around it. Needs torch and scikit-learn."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

NUM_CLIENTS, PER_ROUND, BATCH, RATE = 1000, 100, 16, 0.1


class Part(NamedTuple):
    """Of one client."""

    images: Tensor
    labels: Tensor


def model() -> nn.Module:
    """64 pixels to 10 digits; the same values each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def parts() -> list[Part]:
    """The digits, each client with one or two."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    cuts = [index * len(labels) // NUM_CLIENTS for index in range(NUM_CLIENTS + 1)]
    return [Part(images[a:b], labels[a:b]) for a, b in itertools.pairwise(cuts)]


def accuracy(net: nn.Module) -> float:
    """On all digits."""
    whole = [torch.cat(column) for column in zip(*parts(), strict=True)]
    with torch.no_grad():
        return float((net(whole[0]).argmax(dim=1) == whole[1]).float().mean())


def train(net: nn.Module, part: Part) -> None:
    """One epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for images, labels in zip(part.images.split(BATCH), part.labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
