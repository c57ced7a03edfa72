"""Which samples a rank gets: its slice of every global batch, so batches are the same at every world size.

The loader's `batch_size` is the global one. A map-style loader is rebuilt around the same batches with only this rank's
indices, so one rank fetches each sample. Any other iterable yields whole batches, of which each rank keeps its rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.ledger.data_position import (
    END_OF_DATA,
    OTHER_DATA_HINT,
    SeededSamples,
    begin_epoch,
    length_of,
    positioned,
    require_exactly_once,
    require_one_order,
    require_same_order,
    with_positions,
)
from torsh_distributed.train.ledger.same_batches import compare_first_batch, ending_together

T = TypeVar("T")

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
    num_done: int | None = None
    """Their samples; None if only the batches were counted, as checkpoints of earlier versions did."""
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
    """The number of samples in a batch: dim 0 of its tensors, or the entries of its lists of samples."""
    found = _num_samples(batch)
    if found is None:
        raise InvalidArgument(
            "a batch must hold tensors whose dim 0 counts samples",
            hint="use a collate function that stacks samples into tensors",
            batch_type=type(batch).__name__,
        )
    return found


def has_rows(batch: Batch) -> bool:
    """Whether a batch can be cut into samples: each of its tensors has as many, but for single numbers."""
    return len(set(_numbers_of_rows(batch, _num_samples(batch)))) <= 1


def _num_samples(batch: Batch) -> int | None:
    """By the first tensor that is in no list of tensors: such a list may have an entry for each sample."""
    outside = next(_rows_outside_lists(batch), None)
    if outside is not None:
        return outside
    for one in _lists_in(batch):
        rows = [part for part in one if isinstance(part, Tensor) and part.dim()]
        are_alike = len(rows) == len(one) and len({(part.shape[1:], part.dtype) for part in rows}) == 1
        if isinstance(one[0], Mapping) or (are_alike and len({len(part) for part in rows}) > 1):
            return len(one)
    return next(_numbers_of_rows(batch, None), None)


def _rows_outside_lists(batch: Batch) -> Iterator[int]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield len(batch)
    elif isinstance(batch, Mapping | list | tuple) and not _is_list(batch):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _rows_outside_lists(part)


def _lists_in(batch: Batch) -> Iterator[Sequence[Any]]:
    if _is_list(batch):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lists_in(part)


def _is_list(batch: Batch) -> bool:
    """Whether all entries are of one kind: tensors, mappings that are alike, or texts."""
    if not isinstance(batch, list | tuple) or not batch or hasattr(batch, "_fields"):
        return False
    if all(isinstance(one, Mapping) for one in batch):
        return _are_alike(batch)
    return any(all(isinstance(one, kind) for one in batch) for kind in (Tensor, str))


def _are_alike(mappings: Sequence[Mapping[Any, Any]]) -> bool:
    """Whether these may be samples; else they are columns, such as named inputs and named targets.

    Samples have the same names, but for some that not all have; of columns every tensor has as many rows.
    """
    names = [set(one) for one in mappings if one]
    if all(one == names[0] for one in names):
        return True
    rows = {number for one in mappings for number in _rows_outside_lists(one)}
    return bool(set.intersection(*names)) and len(rows) > 1


def _is_of_samples(batch: Batch, num_samples: int | None) -> bool:
    """Whether a list has an entry for each sample, rather than tensors that each have all of them."""
    if not _is_list(batch) or len(batch) != num_samples:
        return False
    return not all(isinstance(one, Tensor) and one.dim() and len(one) == num_samples for one in batch)


def _numbers_of_rows(batch: Batch, num_samples: int | None) -> Iterator[int]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield len(batch)
    elif _is_of_samples(batch, num_samples):
        yield len(batch)
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _numbers_of_rows(part, num_samples)


def _require_rows(batch: Batch, why: str) -> None:
    if not has_rows(batch):
        raise InvalidArgument(
            f"{why} cuts a batch into samples, and its tensors have different numbers of rows",
            hint="let the collate function give every tensor a row for each sample, and keep in the model what all"
            " samples share; or cut nothing: a DataLoader over a dataset with indices,"
            " training.gradient_accumulation = 1",
            rows=sorted(set(_numbers_of_rows(batch, _num_samples(batch)))),
        )


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop of every tensor in the batch, views where possible, in the same nesting; numbers stay."""
    return _cut(batch, lambda rows: rows[start:stop], _num_samples(batch))


def pick_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rows of every tensor in the batch, in the same nesting; numbers stay."""

    def picked(samples: Any) -> Any:
        if isinstance(samples, Tensor):
            return samples[torch.tensor(rows, device=samples.device)]
        return type(samples)(samples[row] for row in rows)

    return _cut(batch, picked, _num_samples(batch))


def _cut(batch: Batch, cut: Callable[[Any], Any], num_samples: int | None) -> Batch:
    if isinstance(batch, Tensor):
        return cut(batch) if batch.dim() else batch
    if _is_of_samples(batch, num_samples):
        return cut(batch)
    if isinstance(batch, Mapping):
        return {key: _cut(value, cut, num_samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, cut, num_samples) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(value, cut, num_samples) for value in batch)
    return batch


def split_rows(
    batch: Batch,
    num_samples: int,
    num_pieces: int,
    *,
    is_largest_first: bool = False,
    multiple: int = 1,
    at_least: int = 1,
) -> list[tuple[Batch, float]]:
    """The batch in `num_pieces` parts, or one per sample if it has fewer, each with its share of the samples.

    Parts are multiples of `multiple` samples, and what is left over is a further one. If all are fewer than `at_least`,
    parts with a share of 0 follow: the first sample again.
    """
    if num_samples == 0:
        raise InvalidArgument("the batch is empty", hint="every rank needs at least one sample: use a larger batch")
    blocks, left = divmod(num_samples, multiple)
    count = min(num_pieces, blocks)
    rest = count - 1 if is_largest_first else 0
    edges = [multiple * ((number * blocks + rest) // count) for number in range(count + 1)] if count else [0]
    edges += [num_samples] if left else []
    rows = list(itertools.pairwise(edges))
    if len(rows) > 1 or at_least > 1:
        _require_rows(batch, "training.gradient_accumulation")
    weightless = [(take_rows(batch, 0, 1), 0.0)] * (at_least - len(rows))
    if len(rows) == 1:
        return [(batch, 1.0), *weightless]
    return [(take_rows(batch, start, stop), (stop - start) / num_samples) for start, stop in rows] + weightless


def count_pieces(num_samples: int, num_pieces: int, *, multiple: int = 1) -> int:
    """How many parts `split_rows` makes."""
    blocks, left = divmod(num_samples, multiple)
    return min(num_pieces, blocks) + (left > 0)


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
    """This rank's batches of one epoch, without what is done; the order depends on seed and epoch only.

    What is done is a number of samples: the rest of the epoch may be read in batches of another size.
    """
    if order.is_exactly_once:
        require_exactly_once(loader)
    begin_epoch(loader, order.epoch)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        indexed = _batches_of(loader, order)
        if indexed is not None:
            planned = [list(indices) for indices in indexed]
            # Beside a sampler of batches, which is the user's, torch puts a sequential one that is not asked.
            is_ours = loader.batch_size is not None and isinstance(loader.sampler, SequentialSampler | RandomSampler)
            if order.is_exactly_once:
                again = planned if is_ours else [list(indices) for indices in _batches_of(loader, order) or ()]
                require_one_order(planned, again, loader, epoch=order.epoch, compares_ranks=order.compares_ranks)
            elif order.compares_ranks and not is_ours:
                require_same_order(planned, loader, epoch=order.epoch)
            rest = _not_done(indexed, planned, order)
            fetched = _fetched(loader, rest, order, part=part, num_parts=num_parts)
            # Where each rank has a part of its own there is nothing to compare.
            if order.compares_ranks and process_group.is_initialized() and process_group.world_size() > num_parts:
                fetched = _compared(fetched, order, part=part)
            yield from fetched
            return
    stream = positioned(loader) if order.is_exactly_once else None
    if stream is not None and order.position is not None:
        if order.position == END_OF_DATA:
            return
        stream.load_state_dict(order.position)
        order = replace(order, skip=0, num_done=0)
    batches = _read_on(loader, order)
    if order.compares_ranks:
        batches = _compared(batches, order, part=part, is_whole=True)
        if length_of(loader) is None:
            batches = ending_together(batches, epoch=order.epoch)
    for batch, position in ((one, None) for one in batches) if stream is None else with_positions(batches, stream):
        total = count_samples(batch)
        if num_parts > 1:
            _require_rows(batch, "a loader without indices")
        share = rows_of(total, part=part, num_parts=num_parts)
        rows = take_rows(batch, share.start, share.stop) if len(share) else take_rows(batch, 0, 1)
        yield RankBatch(rows, len(share), total, position=position)


def _compared(batches: Iterator[T], order: DataOrder, *, part: int, is_whole: bool = False) -> Iterator[T]:
    """The same batches; the first one is compared between ranks."""
    first = next(batches, None)
    batch = first.batch if isinstance(first, RankBatch) else first
    compare_first_batch(batch, epoch=order.epoch, part=part, is_whole=is_whole)
    if first is not None:
        yield first
        yield from batches


def _read_on(loader: Iterable[Batch], order: DataOrder) -> Iterator[Batch]:
    """The batches after what is done; one that is done in part, because batches had another size, gives its rest."""
    if order.num_done is None:
        yield from itertools.islice(loader, order.skip, None)
        return
    left = order.num_done
    for batch in loader:
        if left == 0:
            yield batch
            continue
        total = count_samples(batch)
        if total > left:
            yield take_rows(batch, left, total)
        left = max(0, left - total)
    if left:
        raise InvalidArgument(
            f"epoch {order.epoch} was interrupted after {order.num_done} samples, but the data end after"
            f" {order.num_done - left}: they are not those that it began with",
            hint=OTHER_DATA_HINT,
            done=order.num_done,
            found=order.num_done - left,
        )


def _batches_of(loader: DataLoader[Any], order: DataOrder) -> Iterable[list[int]] | None:
    """The indices of the loader's global batches; a shuffling loader's are redrawn, equally on every rank."""
    batches = loader.batch_sampler
    sampler: Iterable[int] = loader.sampler
    if isinstance(sampler, RandomSampler) and isinstance(batches, BatchSampler):
        sampler = RandomSampler(
            loader.dataset,  # type: ignore[arg-type]  # a map-style dataset with a sampler has a length
            replacement=sampler.replacement,
            num_samples=sampler.num_samples,
            generator=_generator(order.seed, order.epoch),
        )
    elif type(batches) is not BatchSampler:
        return batches
    # Drawn once: asked again, a sampler may give another order.
    return BatchSampler(list(sampler), batches.batch_size, batches.drop_last)


def _not_done(batches: Iterable[list[int]], planned: list[list[int]], order: DataOrder) -> list[list[int]]:
    """The batches after what is done. Those of a sampler are cut again, from the first sample that is not."""
    if order.num_done is None:
        return planned[order.skip :]
    if type(batches) is BatchSampler:
        rest = list(batches.sampler)[order.num_done :]
        return [list(indices) for indices in BatchSampler(rest, batches.batch_size, batches.drop_last)]
    # What another sampler of batches puts into one depends on how large they are.
    done = sum(len(indices) for indices in planned[: order.skip])
    if done != order.num_done:
        raise InvalidArgument(
            f"epoch {order.epoch} was interrupted after {order.skip} batches of {order.num_done} samples, but"
            f" {type(batches).__name__} now gives {done} in as many",
            hint="give it the batch size that it had; batches of a plain sampler may change their size",
            done=order.num_done,
            found=done,
        )
    return planned[order.skip :]


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
