"""Reads parts of stored tensors into memory, straight into the destination where it has the bytes' form.

The reads of a rank are planned first and then done in the order of the files, by one thread. The system is told of the
next ones early, so the disk reads them meanwhile. Several threads would be slower: they wait for each other whenever
the destination gets a new page.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.weights.safetensors_format import FileTensor

_READ_BYTES = 8 * 2**20
_NUM_AHEAD = 16


@dataclass(frozen=True)
class RowRead:
    """Rows of a stored tensor for the rows of a tensor in memory."""

    stored: FileTensor
    start: int
    stop: int
    into: Tensor
    """As many rows; any dtype and device."""


def read_rows(reads: Iterable[RowRead]) -> None:
    """Do all reads. OSError and CheckpointError (a file that became shorter) pass through."""
    pieces = [piece for read in reads for piece in _pieces(read)]
    pieces.sort(key=lambda piece: (str(piece.stored.file), piece.stored.start + piece.start * piece.stored.row_bytes))
    with ExitStack() as stack:
        opened: dict[Path, int] = {}
        for file in {piece.stored.file for piece in pieces}:
            opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, opened[file])
        ahead = iter(pieces)
        for piece in itertools.islice(ahead, _NUM_AHEAD):
            _announce(opened[piece.stored.file], piece)
        for piece in pieces:
            for later in itertools.islice(ahead, 1):
                _announce(opened[later.stored.file], later)
            _read(opened[piece.stored.file], piece)


def _pieces(read: RowRead) -> Iterable[RowRead]:
    """The read in parts of a few megabytes."""
    step = max(1, _READ_BYTES // max(1, read.stored.row_bytes))
    for start in range(read.start, read.stop, step):
        stop = min(start + step, read.stop)
        rows = read.into if not read.into.dim() else read.into[start - read.start : stop - read.start]
        yield RowRead(read.stored, start, stop, rows)


def _announce(file: int, piece: RowRead) -> None:
    """Let the system begin to read it."""
    stored = piece.stored
    offset, num_bytes = stored.start + piece.start * stored.row_bytes, (piece.stop - piece.start) * stored.row_bytes
    os.posix_fadvise(file, offset, num_bytes, os.POSIX_FADV_WILLNEED)


def _read(file: int, piece: RowRead) -> None:
    stored, into = piece.stored, piece.into
    is_direct = into.dtype == stored.dtype and into.device.type == "cpu" and into.is_contiguous()
    buffer = into if is_direct else torch.empty(into.shape, dtype=stored.dtype)
    _fill(file, stored.start + piece.start * stored.row_bytes, buffer, stored)
    if not is_direct:
        into.copy_(buffer)


def _fill(file: int, offset: int, buffer: Tensor, stored: FileTensor) -> None:
    """Read as many bytes as `buffer`, a contiguous tensor of the host, has."""
    if not buffer.numel():
        return
    left = memoryview(buffer.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
    while left:
        count = os.preadv(file, [left], offset)
        if count == 0:
            raise CheckpointError(
                f"{stored.file} became shorter while it was read", hint="write weights, then load them"
            )
        left, offset = left[count:], offset + count


def with_whole(stored: FileTensor, use: Callable[[Tensor], Any]) -> None:
    """Call `use` with the whole tensor, mapped from the file: only what is touched is read, and nothing stays mapped.

    For parts that are not rows, such as columns.
    """
    with stored.file.open("rb") as opened:
        begin = stored.start - stored.start % mmap.ALLOCATIONGRANULARITY
        length = stored.start - begin + stored.num_bytes
        # A private mapping: torch takes writable memory only, and this is never written.
        mapped = mmap.mmap(opened.fileno(), length, flags=mmap.MAP_PRIVATE, offset=begin)
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    values = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.num_bytes, offset=stored.start - begin)
    # The tensor keeps the mapping; it goes when the caller's last view goes.
    use(_aligned(values, stored).view(stored.shape))


def _aligned(values: Tensor, stored: FileTensor) -> Tensor:
    """The bytes as elements; a file may have them at an odd offset, where torch cannot read them in place."""
    if (
        values.storage_offset() * values.element_size() % stored.dtype.itemsize
        or values.data_ptr() % stored.dtype.itemsize
    ):
        values = values.clone()
    return values.view(stored.dtype)
