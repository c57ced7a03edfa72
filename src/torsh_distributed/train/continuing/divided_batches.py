"""The batches of an epoch, which can be divided again among another number of ranks, the current one included."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from torsh_distributed.train.batches import Batch, RankBatch, count_samples, rows_of, sharded, take_rows


class DividedBatches(Iterator[RankBatch]):
    """This rank's share of each global batch, as `sharded` gives it; `divide` changes the shares from the current one.

    A map-style loader is rebuilt from the current batch on. Of any other iterable the current global batch is kept,
    so nothing is read twice.
    """

    def __init__(
        self, loader: Iterable[Batch], *, part: int, num_parts: int, seed: int, epoch: int = 0, skip: int = 0
    ) -> None:
        self._loader = loader
        self._share = (part, num_parts)
        self._order = (seed, epoch)
        self._taken = skip
        self._whole: Batch | None = None
        is_mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        self._source: Iterator[Any] | None = None if is_mapped else itertools.islice(loader, skip, None)
        self._pieces = self._open() if is_mapped else None

    @override
    def __next__(self) -> RankBatch:
        if self._pieces is not None:
            piece = next(self._pieces)
        else:
            assert self._source is not None, "the loader is one or the other"
            self._whole = next(self._source)
            piece = self._cut(self._whole)
        self._taken += 1
        return piece

    def divide(self, part: int, num_parts: int) -> RankBatch:
        """The share of the current batch as part `part` of `num_parts`; later ones are divided likewise."""
        self._share = (part, num_parts)
        if self._pieces is None:
            return self._cut(self._whole)
        self._taken -= 1
        self._pieces = self._open()
        return next(self)

    def divide_next(self, part: int, num_parts: int) -> None:
        """Divide the batches after the current one like that."""
        self._share = (part, num_parts)
        if self._pieces is not None:
            self._pieces = self._open()

    def _open(self) -> Iterator[RankBatch]:
        (part, num_parts), (seed, epoch) = self._share, self._order
        return sharded(self._loader, part=part, num_parts=num_parts, seed=seed, epoch=epoch, skip=self._taken)

    def _cut(self, whole: Batch) -> RankBatch:
        part, num_parts = self._share
        total = count_samples(whole)
        share = rows_of(total, part=part, num_parts=num_parts)
        rows = take_rows(whole, share.start, share.stop) if len(share) else take_rows(whole, 0, 1)
        return RankBatch(rows, len(share), total)
