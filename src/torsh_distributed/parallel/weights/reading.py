"""Reads parts of stored tensors into memory: a few threads, straight into the destination where it has the bytes' form.

The reads of a rank are planned first and then done in the order of the files. Several are under way at once, because
one reader seldom keeps a disk busy; each is a few megabytes, so none waits long for another.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.weights.safetensors_format import FileTensor

_NUM_READERS = 4
_READ_BYTES = 8 * 2**20


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
        with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="torsh-weights") as readers:
            for _ in readers.map(lambda piece: _read(opened[piece.stored.file], piece), pieces):
                pass


def _pieces(read: RowRead) -> Iterable[RowRead]:
    """The read in parts of a few megabytes."""
    step = max(1, _READ_BYTES // max(1, read.stored.row_bytes))
    for start in range(read.start, read.stop, step):
        stop = min(start + step, read.stop)
        rows = read.into if not read.into.dim() else read.into[start - read.start : stop - read.start]
        yield RowRead(read.stored, start, stop, rows)


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
