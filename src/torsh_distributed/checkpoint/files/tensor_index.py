"""Where every tensor of a checkpoint is: boxes of whole tensors, each in an archive in one of the files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torsh_distributed.checkpoint.files.manifest import is_count
from torsh_distributed.unreadable_data import reason_of


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
    def from_bytes(cls, data: bytes, files: Mapping[str, int], *, is_compressed: bool) -> Self:
        """As read, for a checkpoint of these files (name to bytes); ValueError for what does not fit them.

        The manifest's hashes find damage, not forgery: every name, shape, offset and size is checked here, before
        anything is opened or memory is taken. A box lies inside its tensor, apart from the others, and its bytes
        inside a file of the checkpoint.
        """
        try:
            value = json.loads(data)
            names, tensors = value["files"], value["tensors"]
            unknown = [name for name in names if name not in files]
            if unknown:
                raise ValueError(f"{str(unknown[0])[:200]!r} is not a file of the checkpoint")
            found = {}
            for name, (dtype, shape, boxes) in tensors.items():
                stored = tuple(
                    StoredBox(tuple(offsets), tuple(sizes), names[_count(number)], start, length, data_start)
                    for offsets, sizes, number, start, length, data_start in boxes
                )
                found[name] = IndexedTensor(dtype, tuple(shape), stored)
                _require_sound(name, found[name], files, is_compressed=is_compressed)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is not an index: {reason_of(error)}") from error
        return cls(found)


_MOST_DIMS = 64
_MOST_NUMEL = 2**60
_MOST_HEAD_BYTES = 1 << 16
"""Of an archive before the tensor's own bytes: a few hundred are written."""
_MOST_RATIO = 1 << 17
"""A block of zstd is 128 KB at most, and takes 4 bytes at least."""
_DTYPE = re.compile(r"(?:u?int|b?float|complex|bits|q?u?int)(\d+)(?:x\d+)?(?:_\w+)?|bool")


def item_bytes(dtype: str) -> int:
    """Bytes of one element of torch's dtype of this name, known without torch; ValueError for no such name."""
    match = _DTYPE.fullmatch(dtype) if isinstance(dtype, str) else None
    if match is None:
        raise ValueError(f"{str(dtype)[:60]!r} is not a dtype")
    return max(1, int(match[1] or 8) // 8)


def _count(value: int) -> int:
    if not is_count(value):
        raise ValueError(f"{str(value)[:60]} is not a number of bytes or elements")
    return value


def _require_sound(name: str, tensor: IndexedTensor, files: Mapping[str, int], *, is_compressed: bool) -> None:
    itemsize = item_bytes(tensor.dtype)
    if len(tensor.shape) > _MOST_DIMS or math.prod(map(_count, tensor.shape)) > _MOST_NUMEL:
        raise ValueError(f"{name} cannot have the shape {str(tensor.shape)[:200]}")
    for box in tensor.boxes:
        lengths = {len(tensor.shape), len(box.offsets), len(box.sizes)}
        is_inside = len(lengths) == 1 and all(
            _count(start) + _count(size) <= whole
            for start, size, whole in zip(box.offsets, box.sizes, tensor.shape, strict=True)
        )
        if not is_inside:
            raise ValueError(f"a box of {name} lies outside of its shape {tensor.shape}")
        data_stop = _count(box.data_start) + math.prod(box.sizes) * itemsize
        is_held = data_stop <= box.length * (_MOST_RATIO if is_compressed else 1)
        if _count(box.start) + _count(box.length) > files[box.file] or not is_held or box.data_start > _MOST_HEAD_BYTES:
            raise ValueError(f"the bytes of {name} are not all in {box.file}")
    if sum(math.prod(box.sizes) for box in tensor.boxes) != tensor.numel or _overlaps(tensor.boxes):
        raise ValueError(f"the boxes of {name} do not hold each element of it once")


def _overlaps(boxes: Sequence[StoredBox]) -> bool:
    """Whether any two boxes share an element: then others could be missing, and read as what memory held before."""
    filled = [box for box in boxes if math.prod(box.sizes)]
    if len(filled) < 2 or not filled[0].sizes:
        return len(filled) > 1
    # A sweep along the dim that is cut the most, in which few boxes are open at a time.
    dims = range(len(filled[0].sizes))
    dim = max(dims, key=lambda one: len({box.offsets[one] for box in filled}))
    opened: list[StoredBox] = []
    for box in sorted(filled, key=lambda one: one.offsets[dim]):
        opened = [one for one in opened if one.offsets[dim] + one.sizes[dim] > box.offsets[dim]]
        if any(_meet(box, other) for other in opened):
            return True
        opened.append(box)
    return False


def _meet(one: StoredBox, other: StoredBox) -> bool:
    return all(
        start < first + length and first < start + size
        for start, size, first, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
