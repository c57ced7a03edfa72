"""Ray Data as input of `engine.batches`: rows by index, or a stream that can say where it is.

`RayRows` gives random access to a materialized dataset: a `DataLoader` over it shuffles, and positions are indices, so
that every sample is used once per epoch at any number of ranks, also after a restart with another number. A rank
fetches the blocks that its rows are in, without a copy where the object store of its node has them.
`RayStream` reads a dataset too large for that in its own order; every rank reads all of it and keeps its rows.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument

_MAX_CACHED_BLOCKS = 16


class RayRows(Dataset[Any]):
    """The rows of a Ray dataset by their number; made in the driver, used in the ranks.

    A row is a dict of tensors, of `columns` or of all. Keep the object alive in the driver, which owns the blocks.
    """

    def __init__(self, dataset: Any, *, columns: Sequence[str] | None = None) -> None:
        chosen = dataset.select_columns(list(columns)) if columns is not None else dataset
        materialized = chosen.materialize()
        self._blocks: list[Any] = []
        counts: list[int] = []
        for bundle in materialized.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                # A pair until Ray 2.5x, a record since.
                reference, metadata = entry if isinstance(entry, tuple) else (entry.ref, entry.metadata)
                if metadata.num_rows:
                    self._blocks.append(reference)
                    counts.append(int(metadata.num_rows))
        if not counts:
            raise InvalidArgument("the Ray dataset has no rows")
        self._ends = list(itertools.accumulate(counts))
        self._cache: collections.OrderedDict[int, dict[str, np.ndarray[Any, Any]]] = collections.OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": collections.OrderedDict()}

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Rows for a DataLoader's batch."""
        import torch

        rows = []
        for index in indices:
            block = bisect.bisect_right(self._ends, index)
            offset = index - (self._ends[block - 1] if block else 0)
            columns = self._columns(block)
            rows.append({name: torch.as_tensor(values[offset]) for name, values in columns.items()})
        return rows

    def _columns(self, block: int) -> dict[str, np.ndarray[Any, Any]]:
        """A block by columns; those used last are kept."""
        found = self._cache.pop(block, None)
        if found is None:
            import ray
            from ray.data.block import BlockAccessor

            found = dict(BlockAccessor.for_block(ray.get(self._blocks[block])).to_numpy())
            if len(self._cache) >= _MAX_CACHED_BLOCKS:
                self._cache.popitem(last=False)
        self._cache[block] = found
        return found


class RayStream:
    """Global batches of a Ray dataset in its own order, with a position that a checkpoint keeps."""

    def __init__(self, dataset: Any, *, batch_size: int) -> None:
        """`batch_size` is the global one. The dataset must give the same order each time: no random shuffle."""
        self._dataset = dataset
        self._batch_size = batch_size
        self._skip = 0
        self._given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import ray.data

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        skip, self._skip = self._skip, 0
        self._given = skip
        batches = self._dataset.iter_torch_batches(batch_size=self._batch_size)
        for batch in itertools.islice(batches, skip, None):
            self._given += 1
            yield dict(batch)
        self._given = 0

    def state_dict(self) -> Mapping[str, Any]:
        """How many batches of this epoch were given out."""
        return {"batches": self._given, "batch_size": self._batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after these batches."""
        if state["batch_size"] != self._batch_size:
            raise InvalidArgument(
                "the position was kept for batches of another size",
                hint="resume with the batch size of the run that saved",
                saved=state["batch_size"],
                now=self._batch_size,
            )
        self._skip = int(state["batches"])
