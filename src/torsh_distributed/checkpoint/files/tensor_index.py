"""Where every tensor of a checkpoint is: boxes of whole tensors, each in an archive in one of the files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple, Self


class StoredBox(NamedTuple):
    """A box of a whole tensor, and the archive that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte of the archive in the file."""
    length: int
    """Bytes of the archive in the file, compressed if the checkpoint is."""
    data_start: int
    """First byte of the tensor's own bytes in the archive, once decompressed."""


@dataclass(frozen=True)
class IndexedTensor:
    """A whole tensor and the boxes that make it up."""

    dtype: str
    """torch's name without the module: `float32`."""
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class TensorIndex:
    """All tensors of a checkpoint, by name."""

    tensors: dict[str, IndexedTensor]

    def to_bytes(self) -> bytes:
        """As written: files by number, to keep a large index small."""
        files = sorted({box.file for tensor in self.tensors.values() for box in tensor.boxes})
        number = {file: place for place, file in enumerate(files)}
        tensors = {
            name: [
                tensor.dtype,
                list(tensor.shape),
                [
                    [box.offsets, box.sizes, number[box.file], box.start, box.length, box.data_start]
                    for box in tensor.boxes
                ],
            ]
            for name, tensor in sorted(self.tensors.items())
        }
        return json.dumps({"files": files, "tensors": tensors}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """As read, from bytes that the manifest vouches for."""
        value = json.loads(data)
        files = value["files"]
        return cls(
            {
                name: IndexedTensor(
                    dtype,
                    tuple(shape),
                    tuple(
                        StoredBox(tuple(offsets), tuple(sizes), files[number], start, length, data_start)
                        for offsets, sizes, number, start, length, data_start in boxes
                    ),
                )
                for name, (dtype, shape, boxes) in value["tensors"].items()
            }
        )
