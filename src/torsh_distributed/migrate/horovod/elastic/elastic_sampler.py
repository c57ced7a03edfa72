"""`ElasticSampler`: which samples this rank still has to process in an epoch, whatever the ranks were before.

As in Horovod, the remaining samples are dealt out again after a reset, and padded with repeated ones so every rank has
the same number. With `exactly_once=True` none is repeated or lost: ranks remember the indices they processed, agree on
them at every commit and before some leave, and may differ by one sample; use `hvd.join()` at the end of such an epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from typing_extensions import override

from torsh_distributed.migrate.horovod.world_state import is_up, world


class ElasticSampler(Sampler[int]):
    """Deals the samples of an epoch to the ranks. Call `record_batch` after a batch, `set_epoch` after an epoch."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, exactly_once: bool = False) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.exactly_once = exactly_once
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self._untold: list[int] = []
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self._own: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch: nothing is processed yet."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self._untold = []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has processed a batch, the `batch_idx`-th of `batch_size` since the last reset."""
        if self.exactly_once:
            done = self.get_indices(batch_idx, batch_size)
            self.processed_indices.update(done)
            self._untold += done
            self.processed_num = len(self.processed_indices)
        else:
            self.processed_num += batch_size * self.num_replicas

    def news(self) -> tuple[int, list[int]]:
        """The epoch, and what this rank has processed since the ranks last agreed (`exactly_once`)."""
        return self.epoch, self._untold

    def merge(self, told: Sequence[tuple[int, list[int]]]) -> None:
        """Count what the ranks have processed of this epoch; it is not dealt out again after a reset."""
        self.processed_indices.update(index for epoch, done in told if epoch == self.epoch for index in done)
        self.processed_num = len(self.processed_indices)
        self._untold = []

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank."""
        return self._own[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Deal out what is left to the ranks as they are now."""
        self.num_replicas = world().size if is_up() else 1
        self.rank = world().rank if is_up() else 0
        order = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        if self.exactly_once:
            self.remaining_indices = [index for index in order if index not in self.processed_indices]
            self._own = self.remaining_indices[self.rank :: self.num_replicas]
            self.num_samples = len(self._own)
            self.total_size = len(self.remaining_indices)
            return
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        padded = list(itertools.islice(itertools.cycle(self.remaining_indices), self.total_size))
        self._own = padded[self.rank :: self.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """What has been processed."""
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num}
        if self.exactly_once:
            state["processed_indices"] = sorted(self.processed_indices)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after what was processed."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self._untold = []
        self.reset()

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(list(self._own))

    def __len__(self) -> int:
        return self.num_samples
