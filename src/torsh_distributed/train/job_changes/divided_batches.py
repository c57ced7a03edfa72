"""The batches of an epoch, which can be divided again among another number of ranks, the current one included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from torsh_distributed.train.batches import Batch, DataOrder, RankBatch, pick_rows, rows_of, sharded, take_rows


class DividedBatches(Iterator[RankBatch]):
    """This rank's share of each global batch, as `sharded` gives it; `divide` changes the shares from the current one.

    A map-style loader is rebuilt from the current batch on. Of any other iterable the current global batch is kept,
    so nothing is read twice.
    """

    def __init__(self, loader: Iterable[Batch], order: DataOrder, *, part: int, num_parts: int) -> None:
        self._loader = loader
        self._share = (part, num_parts)
        self._done = order
        """With what was done when the current batch was taken."""
        self._num_samples = 0
        self._whole: RankBatch | None = None
        is_mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        self._pieces = self._open() if is_mapped else None
        self._source = None if is_mapped else sharded(loader, order, part=0, num_parts=1)

    @override
    def __next__(self) -> RankBatch:
        self._pass_current()
        if self._pieces is not None:
            piece = next(self._pieces)
        else:
            assert self._source is not None, "the loader is one or the other"
            self._whole = next(self._source)
            piece = self._cut(self._whole)
        self._num_samples = piece.total
        return piece

    def divide(self, part: int, num_parts: int) -> RankBatch:
        """The share of the current batch as part `part` of `num_parts`; later ones are divided likewise."""
        self._share = (part, num_parts)
        if self._pieces is None:
            assert self._whole is not None, "a batch is divided again after it was taken"
            return self._cut(self._whole)
        self._num_samples = 0
        self._pieces = self._open()
        return next(self)

    def divide_next(self, part: int, num_parts: int) -> None:
        """Divide the batches after the current one like that."""
        self._share = (part, num_parts)
        if self._pieces is not None:
            self._pass_current()
            self._pieces = self._open()

    def rows(self, wanted: Sequence[int]) -> Batch:
        """Samples of the current batch: by their indices in a map-style dataset, else by their rows in the batch."""
        if self._whole is not None:
            return pick_rows(self._whole.batch, wanted)
        assert isinstance(self._loader, DataLoader), "else the whole batch was kept"
        data = self._loader.dataset
        fetch = getattr(data, "__getitems__", None)
        samples = fetch(list(wanted)) if fetch is not None else [data[index] for index in wanted]
        return self._loader.collate_fn(samples)

    def _open(self) -> Iterator[RankBatch]:
        part, num_parts = self._share
        return sharded(self._loader, self._done, part=part, num_parts=num_parts)

    def _pass_current(self) -> None:
        """Count the current batch as done; nothing if there is none."""
        if self._num_samples:
            done = None if self._done.num_done is None else self._done.num_done + self._num_samples
            self._done = replace(self._done, skip=self._done.skip + 1, num_done=done)
            self._num_samples = 0

    def _cut(self, whole: RankBatch) -> RankBatch:
        part, num_parts = self._share
        share = rows_of(whole.total, part=part, num_parts=num_parts)
        start, stop = (share.start, share.stop) if len(share) else (0, 1)
        return whole._replace(batch=take_rows(whole.batch, start, stop), num_samples=len(share))
