"""The safetensors format: eight bytes with the header's length, a JSON header, then the tensors' bytes.

Written here because the format's own library writes whole files, while a model that no process can hold is written one
tensor at a time. Headers are read here because rows are read by their offsets (`reading`), which the library does not
tell, and because a file that somebody else wrote is checked before any part of it is used.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torsh_distributed.errors import CheckpointError
from torsh_distributed.unreadable_data import reason_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMS = 64


@dataclass(frozen=True)
class FileTensor:
    """Where a tensor is: a file and its bytes there, which are contiguous."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    name: str = ""
    """What the file calls it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along dim 0; of the only value of a scalar."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, FileTensor]:
    """The tensors of a file by name; CheckpointError if it is damaged, or no safetensors file."""
    if not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{file} is not a file")
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(_LENGTH.size)
        length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - _LENGTH.size):
            raise _damaged(file, "it does not begin with a header")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise _damaged(file, f"its header is not JSON: {error}") from error
    data = _LENGTH.size + length
    try:
        return {
            name: _checked(file, name, about, data, size) for name, about in header.items() if name != "__metadata__"
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(file, f"its header is not one of tensors: {reason_of(error)}") from error


def _checked(file: Path, name: str, about: dict[str, Any], data: int, size: int) -> FileTensor:
    """Where a tensor is, once its shape and its bytes are known to be inside the file; its data start at `data`."""
    if about["dtype"] not in DTYPES:
        raise _damaged(file, f"{name} has the unknown dtype {about['dtype']}")
    start, stop = about["data_offsets"]
    shape = tuple(about["shape"])
    if len(shape) > _MOST_DIMS or not all(type(one) is int and 0 <= one < 2**63 for one in (start, stop, *shape)):
        raise _damaged(file, f"{name} cannot have the shape {str(shape)[:200]} at {str(about['data_offsets'])[:200]}")
    one = FileTensor(file, DTYPES[about["dtype"]], shape, data + start, name)
    if stop - start != one.num_bytes or data + stop > size:
        raise _damaged(file, f"the bytes of {name} are not all there")
    return one


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a whole safetensors file: {why}",
        hint="copy or download it again, and compare its size with the source's",
        bytes=file.stat().st_size,
    )


def header_bytes(tensors: dict[str, dict[str, Any]], *, length: int) -> bytes:
    """A header of exactly `length` bytes with its length in front; spaces fill what the tensors leave."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    assert len(text) <= length, "the room was reserved for the longest header"
    return _LENGTH.pack(length) + text.ljust(length)


def room_for(names: list[str]) -> int:
    """Bytes that no header of tensors with these names exceeds; the data behind it is aligned to 64 bytes."""
    # An entry: the name in JSON, and below 300 bytes for dtype, shape (8 dims of 12 digits) and two offsets.
    most = 64 + sum(len(json.dumps(name)) + 300 for name in names)
    return -(-(most + _LENGTH.size) // 64) * 64 - _LENGTH.size


DATA_STARTS = _LENGTH.size
"""What stands before the header."""
