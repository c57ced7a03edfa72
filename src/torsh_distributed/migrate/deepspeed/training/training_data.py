"""The loader that `initialize(training_data=…)` returns, and one that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings


class DeepSpeedDataLoader:
    """This rank's microbatches of a dataset; `len()` is their number.

    Every epoch has the same order, as in DeepSpeed, unless the script calls `data_sampler.set_epoch`.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Sampler[int] | None) -> None:
        self.dataloader, self.data_sampler = loader, sampler
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)


class RepeatingLoader:
    """Goes over a loader again and again: `next(iter(RepeatingLoader(loader)))` never ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it should


def batch_loader(
    dataset: Dataset[Any],
    settings: RunSettings,
    place: tuple[int, int],
    *,
    batch_size: int | None = None,
    device: torch.device,
    collate_fn: Callable[..., Any] | None = None,
    data_sampler: Sampler[int] | None = None,
    num_local_io_workers: int | None = None,
    pin_memory: bool | None = None,
    route: str = "train",
    **_: Any,
) -> DeepSpeedDataLoader:
    """Microbatches of this rank; `place` is its part of every batch, and how many parts there are.

    Training shuffles, evaluation (`route` "eval" or "predict") does not.
    """
    rank, num_ranks = place
    sampler = data_sampler
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=num_ranks, rank=rank, shuffle=route == "train")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=batch_size or settings.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_local_io_workers or 0,
        pin_memory=device.type == "cuda" if pin_memory is None else pin_memory,
        drop_last=bool(settings.value("dataloader_drop_last", False)),
    )
    return DeepSpeedDataLoader(loader, sampler)
