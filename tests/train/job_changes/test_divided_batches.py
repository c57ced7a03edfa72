"""Batches divided again: at any point, among any number of ranks, every sample of every batch is somebody's, once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torsh_distributed.train.batches import DataOrder, sharded
from torsh_distributed.train.job_changes.divided_batches import DividedBatches

ORDER = DataOrder(seed=3, epoch=1, num_done=0)


class Stream:
    """An iterable that can be read once."""

    def __init__(self) -> None:
        self._batches = iter(torch.arange(90).split(10))

    def __iter__(self) -> Iterator[Tensor]:
        return self._batches


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_every_sample_belongs_to_one_rank_however_often_ranks_change(kind: str) -> None:
    def loader() -> Any:
        return DataLoader(TensorDataset(torch.arange(90)), batch_size=10, shuffle=True) if kind == "map" else Stream()

    plain = DataLoader(TensorDataset(torch.arange(90)), batch_size=10, shuffle=True)
    whole = (
        [piece.batch[0].tolist() for piece in sharded(plain, ORDER, part=0, num_parts=1)]
        if kind == "map"
        else [list(range(start, start + 10)) for start in range(0, 90, 10)]
    )
    source = random.Random(0)
    for _ in range(20):
        num_ranks = source.randint(1, 5)
        ranks = [DividedBatches(loader(), ORDER, part=part, num_parts=num_ranks) for part in range(num_ranks)]
        for expected in whole:
            pieces = [next(rank) for rank in ranks]
            while num_ranks > 1 and source.random() < 0.3:  # some are lost in the middle of the step
                num_ranks -= 1
                ranks = ranks[:num_ranks]
                pieces = [rank.divide(part, num_ranks) for part, rank in enumerate(ranks)]
            rows = [_values(piece.batch)[: piece.num_samples] for piece in pieces]
            assert [value for part in rows for value in part] == expected
            if source.random() < 0.2 and num_ranks > 1:  # one leaves between two steps
                num_ranks -= 1
                ranks = ranks[:num_ranks]
                for part, rank in enumerate(ranks):
                    rank.divide_next(part, num_ranks)


def _values(batch: Tensor | list[Tensor]) -> list[int]:
    return (batch if isinstance(batch, Tensor) else batch[0]).tolist()


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_any_samples_of_the_current_batch_can_be_had(kind: str) -> None:
    loader: Any = DataLoader(TensorDataset(torch.arange(90)), batch_size=10) if kind == "map" else Stream()
    batches = DividedBatches(loader, ORDER, part=0, num_parts=3)
    next(batches), next(batches)
    wanted = [13, 19, 11] if kind == "map" else [3, 9, 1]  # by index, or by row of the second batch
    assert _values(batches.rows(wanted)) == [13, 19, 11]
