"""Random transforms in loader workers: the same for a sample wherever the epoch is resumed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torsh_distributed.train.batches import DataOrder, sharded
from torsh_distributed.train.ledger.seeded_samples import SeededSamples


class Noisy(Dataset[Tensor]):
    name = "of the user"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def test_a_sample_depends_on_seed_epoch_and_itself() -> None:
    data = SeededSamples(Noisy(), seed=1, epoch=2)
    first = data[5]
    data[3]
    assert torch.equal(data[5], first)
    assert not torch.equal(SeededSamples(Noisy(), seed=1, epoch=3)[5], first)
    assert data.name == "of the user"


@pytest.mark.ranks
def test_workers_resume_with_the_same_transforms() -> None:
    def read(skip: int, num_parts: int) -> list[list[float]]:
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1)
        order = DataOrder(seed=5, skip=skip, is_deterministic=True)
        parts = [list(sharded(loader, order, part=part, num_parts=num_parts)) for part in range(num_parts)]
        return [row for pieces in zip(*parts, strict=True) for piece in pieces for row in piece.batch.tolist()]

    whole = read(0, 1)
    assert read(1, 1) == whole[4:]
    assert read(1, 2) == whole[4:]
