"""Dask arrays and dataframes as training data: every rank gets its rows, in the memory of its own worker.

The rows of a collection are cut into as many equal blocks as there are ranks. A partition that lies within a block is
handed over as it is; one that a border cuts is sliced on the worker that gets the slice. Dask moves partitions from
worker to worker, where they are needed; the scheduler sees keys only.

So that `engine.batches` can cut *global* batches, a global batch takes its rows from all blocks in the order of ranks:
the share of a rank is then always in its own block, and each row is used once in an epoch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from torsh_distributed.errors import InvalidArgument

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows start..stop of one partition."""

    partition: int
    start: int
    stop: int


def cut_rows(lengths: Sequence[int], num_blocks: int) -> list[list[RowSlice]]:
    """The rows of partitions of these lengths in `num_blocks` blocks, whose sizes differ by one at most."""
    ends = list(itertools.accumulate(lengths))
    total = ends[-1] if ends else 0
    blocks: list[list[RowSlice]] = []
    for block in range(num_blocks):
        first, last = block * total // num_blocks, (block + 1) * total // num_blocks
        slices = []
        for partition, end in enumerate(ends):
            begin = end - lengths[partition]
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                slices.append(RowSlice(partition, start - begin, stop - begin))
        blocks.append(slices)
    return blocks


def partitions_for(client: Any, data: Mapping[str, Any]) -> Callable[[Sequence[str]], Sequence[Mapping[str, Any]]]:
    """What gives each worker its rows: called with the workers of a job in the order of their ranks."""
    kept = {name: _persisted(client, name, collection) for name, collection in data.items()}

    def assign(workers: Sequence[str]) -> list[dict[str, Any]]:
        given: list[dict[str, Any]] = [{} for _ in workers]
        for name, (futures, lengths) in kept.items():
            blocks = cut_rows(lengths, len(workers))
            for part, (worker, slices) in enumerate(zip(workers, blocks, strict=True)):
                pieces = [_piece(client, worker, futures, lengths, one) for one in slices]
                given[part][name] = client.submit(
                    RankRows, pieces, part, len(workers), sum(lengths), workers=[worker], pure=False
                )
        return given

    return assign


def _piece(client: Any, worker: str, futures: Sequence[Any], lengths: Sequence[int], rows: RowSlice) -> Any:
    whole = futures[rows.partition]
    if (rows.start, rows.stop) == (0, lengths[rows.partition]):
        return whole
    return client.submit(_take_slice, whole, rows.start, rows.stop, workers=[worker], pure=False)


def _take_slice(partition: Any, start: int, stop: int) -> Any:
    """A view of the rows."""
    return partition.iloc[start:stop] if hasattr(partition, "iloc") else partition[start:stop]


def _persisted(client: Any, name: str, collection: Any) -> tuple[list[Any], list[int]]:
    """The partitions as futures, in order of rows, and how many rows each has."""
    from distributed import futures_of

    if hasattr(collection, "chunks") and hasattr(collection, "rechunk"):
        collection = collection.rechunk(dict.fromkeys(range(1, collection.ndim), -1))
    elif not hasattr(collection, "map_partitions"):
        raise InvalidArgument(
            f"data[{name!r}] is neither a Dask array nor a Dask dataframe",
            hint="pass small objects in args: they are copied to every rank",
            got=type(collection).__name__,
        )
    persisted = client.persist(collection)
    by_key = {future.key: future for future in futures_of(persisted)}
    futures = [by_key[key] for key in _keys(persisted.__dask_keys__())]
    lengths = [int(length) for length in client.gather([client.submit(len, one, pure=False) for one in futures])]
    if sum(lengths) == 0:
        raise InvalidArgument(f"data[{name!r}] has no rows")
    return futures, lengths


def _keys(nested: Any) -> Iterator[Any]:
    """The keys of a collection's nested lists, in order."""
    for one in nested:
        if isinstance(one, list):
            yield from _keys(one)
        else:
            yield one


@dataclass
class RankRows:
    """One rank's rows of a collection: pieces of numpy arrays or pandas dataframes, as the worker holds them."""

    pieces: list[Any]
    part: int
    """The rank that they are for."""
    num_parts: int
    total: int
    """Rows of the whole collection, on all ranks."""
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ends = list(itertools.accumulate(len(piece) for piece in self.pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def first(self) -> int:
        """The number of this rank's first row in the whole collection."""
        return self.part * self.total // self.num_parts

    def has(self, index: int) -> bool:
        """Whether this rank has the row of that number."""
        return 0 <= index - self.first < len(self)

    def take(self, indices: Sequence[int]) -> Any:
        """Rows by their number in the whole collection, as tensors: one for an array, by column for a dataframe."""
        local = [index - self.first for index in indices]
        astray = next((index for index in indices if not self.has(index)), None)
        if astray is not None:
            raise InvalidArgument(
                f"row {astray} is not on this rank, which has rows {self.first} to {self.first + len(self) - 1}",
                hint="read Dask data through rows_loader, whose batches fit the ranks",
                part=self.part,
            )
        return _stacked([self._found(index) for index in local])

    def _found(self, index: int) -> tuple[Any, int]:
        piece = bisect.bisect_right(self._ends, index)
        before = self._ends[piece - 1] if piece else 0
        return self.pieces[piece], index - before


def _stacked(rows: Sequence[tuple[Any, int]]) -> Any:
    """The rows as one tensor, or one for each column; rows of one piece are gathered at once."""
    import torch

    order: list[int] = []
    parts: list[Any] = []
    grouped: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
    for position, (piece, row) in enumerate(rows):
        grouped.setdefault(id(piece), (piece, []))[1].append((position, row))
    for piece, found in grouped.values():
        order += [position for position, _ in found]
        chosen = [row for _, row in found]
        parts.append(piece.iloc[chosen] if hasattr(piece, "iloc") else np.asarray(piece)[chosen])
    back = np.argsort(np.asarray(order, dtype=np.int64))
    if hasattr(parts[0], "iloc"):
        columns = list(parts[0].columns) if hasattr(parts[0], "columns") else [None]
        tensors = {
            column: torch.from_numpy(
                np.concatenate([(part if column is None else part[column]).to_numpy() for part in parts])[back]
            )
            for column in columns
        }
        return tensors[None] if columns == [None] else tensors
    return torch.from_numpy(np.concatenate(parts)[back])


class _RowDataset:
    """Rows of one or several collections of the same length, fetched a batch at a time."""

    def __init__(self, rows: Sequence[RankRows], batches: _RankBatches) -> None:
        self._rows = rows
        self._batches = batches

    def __len__(self) -> int:
        return self._rows[0].total

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        own = indices
        if list(indices) == [self._batches.placeholder] and not self._rows[0].has(indices[0]):
            # The last batch has no row for this rank, which computes with one that weighs nothing.
            own = [self._rows[0].first]
        taken = tuple(rows.take(own) for rows in self._rows)
        return taken[0] if len(taken) == 1 else taken


class _RankBatches:
    """Global batches whose share for each rank comes from the rank's own block; the same on every rank."""

    def __init__(self, total: int, num_parts: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        self._total, self._num_parts, self._batch_size = total, num_parts, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch = 0
        self.placeholder: int | None = None
        """The row that ranks without a share of a last, short batch are asked for."""

    def set_epoch(self, epoch: int) -> None:
        """The order depends on it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return (self._total + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        parts = self._num_parts
        edges = [part * self._total // parts for part in range(parts + 1)]
        blocks = []
        for part, (first, last) in enumerate(itertools.pairwise(edges)):
            rows = np.arange(first, last)
            if self._shuffle:
                rows = np.random.default_rng([self._seed, self._epoch, part]).permutation(rows)
            blocks.append(rows)
        taken = [0] * parts
        for start in range(0, self._total, self._batch_size):
            size = min(self._batch_size, self._total - start)
            batch: list[int] = []
            for part in range(parts):
                count = (part + 1) * size // parts - part * size // parts
                batch += blocks[part][taken[part] : taken[part] + count].tolist()
                taken[part] += count
            self.placeholder = batch[0] if size < parts else None
            yield batch


def rows_loader(*rows: RankRows, batch_size: int, shuffle: bool = True, seed: int = 0) -> Any:
    """A DataLoader for `engine.batches` over the rows of one or several collections of equal length.

    `batch_size` is the global one, a multiple of the number of ranks. Batches are tensors (dicts of them for a
    dataframe), in a tuple for several collections. Rows are shuffled within each rank's block. The order is the same
    at every start with the same number of ranks; with another number it is another.
    """
    from torch.utils.data import DataLoader

    if not rows:
        raise InvalidArgument("rows_loader needs the rows of at least one collection")
    first = rows[0]
    if any((one.total, one.num_parts) != (first.total, first.num_parts) for one in rows):
        raise InvalidArgument(
            "the collections have different numbers of rows", rows=", ".join(str(one.total) for one in rows)
        )
    if batch_size < 1 or batch_size % first.num_parts:
        raise InvalidArgument(
            f"a batch of {batch_size} rows does not split evenly over {first.num_parts} ranks",
            hint="the batch size is the global one: take a multiple of the number of ranks",
            batch_size=batch_size,
        )
    if first.total < first.num_parts:
        raise InvalidArgument(
            f"{first.total} rows are too few for {first.num_parts} ranks", hint="give the job fewer ranks"
        )
    batches = _RankBatches(first.total, first.num_parts, batch_size, shuffle=shuffle, seed=seed)
    # Any: torch types a batch sampler as a Sampler, and asks for its methods only.
    return DataLoader(cast(Any, _RowDataset(rows, batches)), batch_sampler=cast(Any, batches), collate_fn=_as_it_is)


def _as_it_is(batch: T) -> T:
    """The dataset has stacked it already."""
    return batch
