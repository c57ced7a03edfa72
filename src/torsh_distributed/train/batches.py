"""Which samples a rank gets: its slice of every global batch, so batches are the same at every world size.

The loader's `batch_size` is the global one. A map-style loader is rebuilt around the same batches with only this rank's
indices, so one rank fetches each sample. Any other iterable yields whole batches, of which each rank keeps its rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.ledger.data_position import (
    begin_epoch,
    positioned,
    require_exactly_once,
    require_one_order,
)
from torsh_distributed.train.ledger.seeded_samples import SeededSamples

Batch = Any
"""Nested tuples, lists and mappings of tensors, as a collate function returns them; dim 0 counts samples."""


@dataclass(frozen=True)
class RowRange:
    """The rows of a batch that a rank gets: start..stop."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class RankBatch(NamedTuple):
    """A rank's share of a global batch of `total` samples."""

    batch: Batch
    num_samples: int
    """How many of them are this rank's. At 0 the batch holds one sample of another rank, for strategies whose ranks
    must all call forward equally often."""
    total: int
    ids: Sequence[int] | None = None
    """Indices of the whole global batch, where the data have them."""
    position: Any = None
    """Where a stream stands after this batch, if it can say."""


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """Which epoch to read, from where on, and how strictly."""

    seed: int
    epoch: int = 0
    skip: int = 0
    """Batches at its start that are done."""
    position: Any = None
    """Where a stream stood after them."""
    is_exactly_once: bool = False
    """Refuse data that could lose or repeat a sample."""
    compares_ranks: bool = True
    """With it: compare the order between ranks too, which all of them then begin at the same time."""
    is_deterministic: bool = False
    """Seed loader workers for every sample."""


def rows_of(num_samples: int, *, part: int, num_parts: int) -> RowRange:
    """Part `part` of `num_parts`; sizes differ by at most one, and together they cover every sample once."""
    return RowRange(part * num_samples // num_parts, (part + 1) * num_samples // num_parts)


def count_samples(batch: Batch) -> int:
    """The number of samples in a batch: dim 0 of its first tensor."""
    if isinstance(batch, Tensor) and batch.dim() > 0:
        return batch.shape[0]
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(parts, Iterable) and not isinstance(parts, str | bytes | Tensor):
        for part in parts:
            return count_samples(part)
    raise InvalidArgument(
        "a batch must hold tensors whose dim 0 counts samples",
        hint="use a collate function that stacks samples into tensors",
        batch_type=type(batch).__name__,
    )


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop of every tensor in the batch, views where possible, in the same nesting."""
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {key: take_rows(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(take_rows(value, start, stop) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(take_rows(value, start, stop) for value in batch)
    return batch


def pick_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rows of every tensor in the batch, in the same nesting."""
    if isinstance(batch, Tensor):
        return batch[torch.tensor(rows, device=batch.device)]
    if isinstance(batch, Mapping):
        return {key: pick_rows(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(pick_rows(value, rows) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(pick_rows(value, rows) for value in batch)
    return batch


def split_rows(
    batch: Batch, num_samples: int, num_pieces: int, *, is_largest_first: bool = False
) -> list[tuple[Batch, float]]:
    """The batch in `num_pieces` parts, or one per sample if it has fewer, each with its share of the samples."""
    count = min(num_pieces, num_samples)
    if count == 0:
        raise InvalidArgument("the batch is empty", hint="every rank needs at least one sample: use a larger batch")
    if count == 1:
        return [(batch, 1.0)]
    rest = count - 1 if is_largest_first else 0
    edges = [(number * num_samples + rest) // count for number in range(count + 1)]
    return [(take_rows(batch, start, stop), (stop - start) / num_samples) for start, stop in itertools.pairwise(edges)]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`; tensors already there are not copied."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def sharded(loader: Iterable[Batch], order: DataOrder, *, part: int, num_parts: int) -> Iterator[RankBatch]:
    """This rank's batches of one epoch, without those that are done; the order depends on seed and epoch only."""
    if order.is_exactly_once:
        require_exactly_once(loader)
    begin_epoch(loader, order.epoch)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        batches = _batches_of(loader, order)
        if batches is not None:
            planned = [list(indices) for indices in batches]
            if order.is_exactly_once:
                is_ours = isinstance(loader.sampler, SequentialSampler | RandomSampler)
                again = planned if is_ours else [list(indices) for indices in _batches_of(loader, order) or ()]
                require_one_order(planned, again, loader, epoch=order.epoch, compares_ranks=order.compares_ranks)
            yield from _fetched(loader, planned[order.skip :], order, part=part, num_parts=num_parts)
            return
    stream, skip = positioned(loader) if order.is_exactly_once else None, order.skip
    if stream is not None and order.position is not None:
        stream.load_state_dict(order.position)
        skip = 0
    for batch in itertools.islice(loader, skip, None):
        total = count_samples(batch)
        share = rows_of(total, part=part, num_parts=num_parts)
        rows = take_rows(batch, share.start, share.stop) if len(share) else take_rows(batch, 0, 1)
        yield RankBatch(rows, len(share), total, position=None if stream is None else stream.state_dict())


def _batches_of(loader: DataLoader[Any], order: DataOrder) -> Iterable[list[int]] | None:
    """The indices of the loader's global batches; a shuffling loader's are redrawn, equally on every rank."""
    batches = loader.batch_sampler
    if isinstance(loader.sampler, RandomSampler) and isinstance(batches, BatchSampler):
        shuffled = RandomSampler(
            loader.dataset,  # type: ignore[arg-type]  # a map-style dataset with a sampler has a length
            replacement=loader.sampler.replacement,
            num_samples=loader.sampler.num_samples,
            generator=_generator(order.seed, order.epoch),
        )
        return BatchSampler(shuffled, batches.batch_size, batches.drop_last)
    return batches


def _generator(*numbers: int) -> torch.Generator:
    """A generator seeded from all the numbers."""
    mixed = functools.reduce(lambda seed, number: (seed * 1_000_003 + number) % 2**63, numbers)
    return torch.Generator().manual_seed(mixed)


def _fetched(
    loader: DataLoader[Any], planned: list[list[int]], order: DataOrder, *, part: int, num_parts: int
) -> Iterator[RankBatch]:
    """This rank's rows of each planned batch, fetched as the loader would fetch them."""
    shares = [rows_of(len(indices), part=part, num_parts=num_parts) for indices in planned]
    data: Dataset[Any] = loader.dataset
    if order.is_deterministic and loader.num_workers > 0:
        data = SeededSamples(data, seed=order.seed, epoch=order.epoch)
    mine = DataLoader(
        data,
        batch_sampler=[
            indices[share.start : share.stop] or indices[:1] for indices, share in zip(planned, shares, strict=True)
        ],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        # Otherwise a loader draws from torch's global generator, and resuming would change dropout.
        generator=_generator(order.seed, order.epoch, part),
    )
    for batch, indices, share in zip(mine, planned, shares, strict=True):
        yield RankBatch(batch, len(share), len(indices), indices)
