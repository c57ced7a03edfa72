"""The image of a rank's data file in memory: tensors are copied straight to where the file has them.

The image is the staging copy. It is made once for a set of boxes and filled again for every save, pinned if tensors are
on a GPU: training waits for one copy at the speed of the bus, and the file is then written from one piece of memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torsh_distributed.checkpoint.files.tensor_archive import ALIGNMENT, TensorArchive, archive_for
from torsh_distributed.checkpoint.memory_copies import MemoryCopies
from torsh_distributed.checkpoint.saving.box_assignment import BoxKey, pieces_of
from torsh_distributed.parallel.state.held_tensors import HeldBox, HeldTensor


@dataclass(frozen=True)
class ImageEntry:
    """A box in the image: where its archive starts, and where in that its data."""

    name: str
    box: HeldBox
    dtype: torch.dtype
    start: int
    archive: TensorArchive

    @property
    def data_start(self) -> int:
        """First byte of the data in the archive."""
        return len(self.archive.head)

    def view(self, image: Tensor) -> Tensor:
        """The box in the image, as a tensor."""
        first = self.start + self.data_start
        return image[first : first + self.archive.num_data_bytes].view(self.dtype).view(self.box.sizes)


class Allocate(Protocol):
    """Gives bytes for an image, all of them zero."""

    def __call__(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """`is_pinned`: a GPU is going to copy into them."""


def private_memory(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Zeros in the memory of this process."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned and num_bytes > 0)


class FileImage:
    """Memory in the form of a data file, for the boxes that this rank writes."""

    def __init__(
        self,
        tensors: Sequence[HeldTensor],
        chosen: set[BoxKey],
        *,
        is_pinned: bool,
        allocate: Allocate = private_memory,
    ) -> None:
        self.entries: list[ImageEntry] = []
        known: dict[tuple[torch.dtype, tuple[int, ...]], TensorArchive] = {}
        end = 0
        for held in tensors:
            for box in held.layout.boxes:
                for piece in pieces_of(box, held.dtype.itemsize):
                    if (held.name, piece.whole, piece.sizes) not in chosen:
                        continue
                    kind = (held.dtype, piece.sizes)
                    if kind not in known:
                        known[kind] = archive_for(*kind)
                    self.entries.append(ImageEntry(held.name, piece, held.dtype, end, known[kind]))
                    end += -(-known[kind].num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end
        self.memory = allocate(end, is_pinned=is_pinned)
        for entry in self.entries:
            _put(self.memory, entry.start, entry.archive.head)
            _put(self.memory, entry.start + entry.data_start + entry.archive.num_data_bytes, entry.archive.tail)
        self._views = [entry.view(self.memory) for entry in self.entries]

    def copy_in(self, tensors: Sequence[HeldTensor]) -> None:
        """Copy this rank's boxes into the image and wait until all of them have arrived."""
        by_name = {held.name: held for held in tensors}
        places = zip(self.entries, self._views, strict=True)
        with MemoryCopies() as copies:
            for name, boxes in itertools.groupby(places, key=lambda place: place[0].name):
                held = by_name[name]
                source = held.read().detach()
                for entry, view in boxes:
                    copies.add(view, entry.box.of(source))
                if held.write is not None:  # perhaps memory made for the purpose: that of one tensor at a time
                    copies.wait_for_threads()

    def bytes(self) -> memoryview:
        """The image, to be written."""
        return self.memory.numpy().data

    def boxes(self) -> list[list[Any]]:
        """Each box as plain values: name, first index, sizes, start and length of its archive, start of its data."""
        return [
            [one.name, one.box.whole, one.box.sizes, one.start, one.archive.num_bytes, one.data_start]
            for one in self.entries
        ]


def _put(memory: Tensor, start: int, data: bytes) -> None:
    if data:
        memory[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
