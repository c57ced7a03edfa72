"""A checkpoint on disk to load from: a rank reads the bytes of its own boxes, and no others."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.checkpoint.files.block_hashes import FileDamage, damaged, read_exactly
from torsh_distributed.checkpoint.files.manifest import SHARED, TENSORS, Manifest, own_file
from torsh_distributed.checkpoint.files.tensor_index import StoredBox, TensorIndex
from torsh_distributed.checkpoint.saving.zstd_archives import decompress
from torsh_distributed.comm.serialization import deserialize
from torsh_distributed.errors import CheckpointError, SerializationError
from torsh_distributed.parallel.state.held_state import SavedState, SavedTensor
from torsh_distributed.parallel.state.held_tensors import HeldBox, WholeLayout


class SavedCheckpoint(SavedState):
    """The state in a checkpoint whose files have been verified."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        try:
            self._index = TensorIndex.from_bytes((directory / TENSORS).read_bytes())
            self.values: Mapping[str, Any] = deserialize((directory / SHARED).read_bytes())
            self.tensors = {
                name: SavedTensor(one.shape, _dtype(one.dtype)) for name, one in self._index.tensors.items()
            }
        except (OSError, ValueError, KeyError, TypeError, SerializationError) as error:
            raise damaged(directory, [FileDamage(TENSORS, f"cannot be understood: {error}")]) from error

    def own_values(self, rank: int) -> Any:
        """What rank `rank` had saved as its own; None if there was no such rank."""
        name = own_file(rank)
        return deserialize((self.directory / name).read_bytes()) if name in self.manifest.files else None

    @override
    def fill(self, name: str, layout: WholeLayout, local: Tensor) -> None:
        tensor = self._index.tensors[name]
        if tensor.shape != layout.shape:
            raise CheckpointError(
                f"{name} has shape {tensor.shape} in {self.directory.name}, and {layout.shape} in the model",
                hint="build the model as it was when the checkpoint was saved",
            )
        dtype = _dtype(tensor.dtype)
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
                raise CheckpointError(f"{self.directory.name} holds {covered} of {wanted.numel} elements of {name}")

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
            self._read_bytes(stored, begin, target.view(-1).view(torch.uint8).numpy().data)
            return
        buffer = torch.empty(length, dtype=torch.uint8)
        self._read_bytes(stored, begin, buffer.numpy().data)
        rows = buffer.view(dtype).view((num_rows, *stored.sizes[1:]) if sizes else ())
        for dim, (at, size) in enumerate(zip(inside, sizes, strict=True)):
            rows = rows if dim == 0 else rows.narrow(dim, at, size)
        target.copy_(rows)

    def _read_bytes(self, stored: StoredBox, begin: int, into: memoryview) -> None:
        """Bytes of a stored tensor from `begin` on."""
        path = self.directory / stored.file
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if self.manifest.compression is None:
                    read_exactly(file, into, stored.start + stored.data_start + begin)
                    return
                packed = bytearray(stored.length)
                read_exactly(file, memoryview(packed), stored.start)
            finally:
                os.close(file)
        except OSError as error:
            raise damaged(self.directory, [FileDamage(stored.file, f"cannot be read: {error}")]) from error
        most = stored.data_start + math.prod(stored.sizes) * 16 + (1 << 16)
        plain = decompress(bytes(packed), most)
        first = stored.data_start + begin
        into[:] = memoryview(plain)[first : first + len(into)]


def _overlap(wanted: HeldBox, stored: StoredBox) -> tuple[list[int], list[int]] | None:
    """First index in the whole tensor and sizes of what two boxes have in common; None if nothing."""
    start = [max(one, other) for one, other in zip(wanted.whole, stored.offsets, strict=True)]
    stop = [
        min(one + size, other + length)
        for one, size, other, length in zip(wanted.whole, wanted.sizes, stored.offsets, stored.sizes, strict=True)
    ]
    sizes = [high - low for low, high in zip(start, stop, strict=True)]
    return None if any(size <= 0 for size in sizes) else (start, sizes)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of torch")
    return found
