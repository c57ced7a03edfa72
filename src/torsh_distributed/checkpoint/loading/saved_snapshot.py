"""Training state of one step, wherever its bytes are: a rank reads those of its own boxes, and no others."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata
from torsh_distributed.checkpoint.files.tensor_index import StoredBox, TensorIndex
from torsh_distributed.errors import CheckpointError, MemoryAllocationFailed
from torsh_distributed.parallel.state.held_state import SavedState, SavedTensor
from torsh_distributed.parallel.state.held_tensors import HeldBox, WholeLayout, whole_layout
from torsh_distributed.unreadable_data import unreadable_as


class SavedSnapshot(SavedState):
    """The state of one step: boxes of whole tensors, and values."""

    load_action: ClassVar[str] = "loaded"
    """What the event says once training goes on from it."""

    def __init__(
        self, place: str, metadata: CheckpointMetadata, index: TensorIndex, values: Mapping[str, Any], *, num_bytes: int
    ) -> None:
        self.place = place
        """Where it is, for people: a path, or whose memory."""
        self.metadata = metadata
        self.values = values
        self.num_bytes = num_bytes
        self._index = index
        self.tensors: dict[str, SavedTensor] = {
            name: SavedTensor(one.shape, dtype_called(one.dtype)) for name, one in index.tensors.items()
        }

    def alias(self, names: Mapping[str, str]) -> None:
        """Let tensors be found under further names, unless those were saved: safetensors files have one for each."""
        for name, first in names.items():
            if name not in self.tensors and first in self.tensors:
                self._index.tensors[name] = self._index.tensors[first]
                self.tensors[name] = self.tensors[first]

    @abstractmethod
    def own_values(self, rank: int) -> Any:
        """What rank `rank` had saved as its own; None if there was no such rank."""

    @abstractmethod
    def read_bytes(self, stored: StoredBox, begin: int, into: memoryview) -> None:
        """Fill `into` with a stored box's bytes from `begin` on."""

    def whole(self, name: str) -> Tensor:
        """A whole tensor on the host."""
        kind = self.tensors[name]
        with unreadable_as(MemoryAllocationFailed, f"{name} of shape {kind.shape} takes more memory than there is"):
            local = torch.empty(kind.shape, dtype=kind.dtype)
        self.fill(name, whole_layout(kind.shape), local)
        return local

    @override
    def fill(self, name: str, layout: WholeLayout, local: Tensor) -> None:
        tensor = self._index.tensors[name]
        if tensor.shape != layout.shape:
            raise CheckpointError(
                f"{name} has shape {tensor.shape} in {self.place}, and {layout.shape} in the model",
                hint="build the model as it was when the checkpoint was saved",
            )
        dtype = dtype_called(tensor.dtype)
        for wanted in layout.boxes:
            covered = 0
            for stored in tensor.boxes:
                common = _overlap(wanted, stored)
                if common is None:
                    continue
                start, sizes = common
                at = [position - first for position, first in zip(start, wanted.whole, strict=True)]
                target = HeldBox(
                    tuple(start), tuple(base + one for base, one in zip(wanted.local, at, strict=True)), tuple(sizes)
                ).of(local)
                self._read(stored, dtype, start, sizes, target)
                covered += math.prod(sizes)
            if covered != wanted.numel:
                raise CheckpointError(f"{self.place} holds {covered} of {wanted.numel} elements of {name}")

    def _read(
        self, stored: StoredBox, dtype: torch.dtype, start: Sequence[int], sizes: Sequence[int], target: Tensor
    ) -> None:
        """Copy a part of a stored box into `target`, a view of the rank's tensor; into its memory if it can be."""
        if math.prod(sizes) == 0:
            return
        inside = [position - first for position, first in zip(start, stored.offsets, strict=True)]
        # Rows along dim 0 are neighbours in the file: only those that are needed are read.
        first_row, num_rows = (inside[0], sizes[0]) if sizes else (0, 1)
        row_numel = math.prod(stored.sizes[1:])
        begin, length = first_row * row_numel * dtype.itemsize, num_rows * row_numel * dtype.itemsize
        takes_whole_rows = tuple(sizes[1:]) == tuple(stored.sizes[1:])
        is_direct = (
            takes_whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
        )
        if is_direct:
            self.read_bytes(stored, begin, target.view(-1).view(torch.uint8).numpy().data)
            return
        buffer = torch.empty(length, dtype=torch.uint8)
        self.read_bytes(stored, begin, buffer.numpy().data)
        rows = buffer.view(dtype).view((num_rows, *stored.sizes[1:]) if sizes else ())
        for dim, (at, size) in enumerate(zip(inside, sizes, strict=True)):
            rows = rows if dim == 0 else rows.narrow(dim, at, size)
        target.copy_(rows)


def _overlap(wanted: HeldBox, stored: StoredBox) -> tuple[list[int], list[int]] | None:
    """First index in the whole tensor and sizes of what two boxes have in common; None if nothing."""
    start = [max(one, other) for one, other in zip(wanted.whole, stored.offsets, strict=True)]
    stop = [
        min(one + size, other + length)
        for one, size, other, length in zip(wanted.whole, wanted.sizes, stored.offsets, stored.sizes, strict=True)
    ]
    sizes = [high - low for low, high in zip(start, stop, strict=True)]
    return None if any(size <= 0 for size in sizes) else (start, sizes)


def dtype_called(name: str) -> torch.dtype:
    """The dtype of torch with this name; TypeError if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of torch")
    return found
