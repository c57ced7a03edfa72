"""Data and models for scripts in other libraries' styles, and for their training in one process."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES, VOCABULARY, LENGTH, WIDTH = 10, 23, 6, 16


def digits(count: int, seed: int = 0) -> TensorDataset:
    """Noisy images of ten patterns, and which one each shows."""
    patterns = torch.randn(NUM_CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 0.4 * torch.randn(count, 1, 8, 8, generator=generator), labels)


def sentences(count: int, seed: int = 0) -> TensorDataset:
    """Rows of tokens in which each token says much about the next, and the next tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(VOCABULARY, (count, 1), generator=generator)]
    for _ in range(LENGTH):
        jump = torch.randint(2, (count, 1), generator=generator)
        rows.append((3 * rows[-1] + jump) % VOCABULARY)
    ids = torch.cat(rows, dim=1)
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def convnet(seed: int = 0) -> nn.Sequential:
    """A small convolutional net."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 32), nn.ReLU(),
        nn.Linear(32, NUM_CLASSES),
    )  # fmt: skip


class Reader(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token."""
        return self.head(self.cell(self.embedding(ids))[0])


class Encoder(nn.Module):
    """Attention layers with a head for every token, as BERT's for fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for every token."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def reader(seed: int = 0) -> Reader:
    """The recurrent model with the values of a seed."""
    torch.manual_seed(seed)
    return Reader()


def encoder(seed: int = 0) -> Encoder:
    """The attention model with the values of a seed."""
    torch.manual_seed(seed)
    return Encoder()


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def report(name: str, losses: list[float]) -> None:
    """Print the losses of a script for who compares them."""
    print(f"losses of {name}: {json.dumps(losses)}", flush=True)
