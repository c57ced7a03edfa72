"""Reads parts of stored tensors into memory, straight into the destination where it has the bytes' form.

The reads of a rank are planned first and then done in the order of the files, by a few threads with a buffer each. What
the system has in memory is copied from there; the rest comes from the disk without a stop in the system's memory. One
thread's bytes arrive while another's are put in their place.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.errors import CheckpointError, missing_extra
from torsh_distributed.parallel.weights.safetensors_format import FileTensor
from torsh_distributed.unreadable_data import unreadable_as

_READ_BYTES = 4 * 2**20
_NUM_READERS = 3
_LEAST_DIRECT_BYTES = 64 * 2**10
_BLOCK_BYTES = 4096
"""A multiple of what disks and memory have to be aligned to for reads without the system's memory."""


@dataclass(frozen=True)
class RowRead:
    """Rows of a stored tensor for the rows of a tensor in memory."""

    stored: FileTensor
    start: int
    stop: int
    into: Tensor
    """As many rows; any dtype and device."""


def read_rows(reads: Iterable[RowRead], memory: MemoryFile | None = None) -> None:
    """Do all reads. OSError and CheckpointError (a file that became shorter) pass through.

    What belongs into `memory` is written through its file.
    """
    pieces = [piece for read in reads for piece in _pieces(read, memory)]
    pieces.sort(key=lambda piece: (str(piece.stored.file), piece.offset))
    with ExitStack() as stack:
        files: dict[Path, _WeightFile] = {}
        for file in {piece.stored.file for piece in pieces}:
            files[file] = _WeightFile(file)
            stack.callback(files[file].close)
        num_readers = min(_NUM_READERS, len(pieces))
        left = deque(pieces)
        if num_readers < 2:
            _read_all(left, files, memory)
            return
        with ThreadPoolExecutor(num_readers, thread_name_prefix="torsh-weights") as readers:
            for done in [readers.submit(_read_all, left, files, memory) for _ in range(num_readers)]:
                done.result()


@dataclass(frozen=True)
class _Piece:
    """Bytes of a stored tensor and where they go."""

    stored: FileTensor
    offset: int
    """In the file."""
    num_bytes: int
    into: Tensor
    """As many bytes of the host if `is_alike`; else rows of another dtype, device or layout."""
    is_alike: bool
    place: int | None = None
    """In the memory file, if they are written through it."""


def _pieces(read: RowRead, memory: MemoryFile | None) -> Iterator[_Piece]:
    """The read in parts that a buffer takes."""
    stored, into, row_bytes = read.stored, read.into.detach(), read.stored.row_bytes
    if not into.numel():
        return
    begin = stored.start + read.start * row_bytes
    if into.dtype == stored.dtype and into.device.type == "cpu" and into.is_contiguous():
        flat = into.reshape(-1).view(torch.uint8)
        place, done = None if memory is None else memory.place_of(flat), 0
        while done < len(flat):
            # Up to the end of a block of the file: the next piece would read that block again.
            count = min(_READ_BYTES - (begin + done) % _BLOCK_BYTES, len(flat) - done)
            where = None if place is None else place + done
            yield _Piece(stored, begin + done, count, flat[done : done + count], is_alike=True, place=where)
            done += count
        return
    step = max(1, _READ_BYTES // row_bytes)
    for start in range(read.start, read.stop, step):
        stop = min(start + step, read.stop)
        rows = into[start - read.start : stop - read.start] if into.dim() else into
        offset = stored.start + start * row_bytes
        yield _Piece(stored, offset, (stop - start) * row_bytes, rows, is_alike=False)


def _read_all(left: deque[_Piece], files: dict[Path, _WeightFile], memory: MemoryFile | None) -> None:
    """Do what is left, beside other threads; if one fails, nothing is left for the others."""
    buffer = _Buffer()
    try:
        while True:
            try:
                piece = left.popleft()
            except IndexError:
                return
            _read(piece, files[piece.stored.file], buffer, memory)
    except BaseException:
        left.clear()
        raise


def _read(piece: _Piece, file: _WeightFile, buffer: _Buffer, memory: MemoryFile | None) -> None:
    if piece.is_alike and piece.place is None and not file.is_from_disk(piece.offset, piece.num_bytes):
        file.fill(memoryview(piece.into.numpy()), piece.offset)  # type: ignore[arg-type]  # an array is a buffer
        return
    found = file.read(piece.offset, piece.num_bytes, buffer)
    if piece.place is not None and memory is not None:
        memory.write(found, piece.place)
        return
    values = torch.frombuffer(found, dtype=torch.uint8)
    piece.into.copy_(values if piece.is_alike else _aligned(values, piece.stored).view(piece.into.shape))


class _Buffer:
    """Memory of one thread that bytes pass through, aligned as disks want it."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def room(self, num_bytes: int) -> memoryview:
        """That many bytes, until the next call."""
        if len(self._memory) < num_bytes:
            self._memory = memoryview(mmap.mmap(-1, num_bytes))
        return self._memory[:num_bytes]


class _WeightFile:
    """A file that parts are read of: from the system's memory if they are there, from the disk past it if not.

    On the way through the system's memory every byte is copied once more, and a new page of it costs as much again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            # Where there is no O_DIRECT everything goes through the system's memory; it is told to look far ahead.
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._map = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, ValueError):
            return
        self._address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)

    def is_from_disk(self, offset: int, num_bytes: int) -> bool:
        """Whether these bytes are read past the system's memory. Asks for the first and last page alone, and of a file
        of another user the system says that it has all."""
        if self._direct is None or num_bytes < _LEAST_DIRECT_BYTES:
            return False
        return not (self._is_in_memory(offset) and self._is_in_memory(offset + num_bytes - 1))

    def _is_in_memory(self, offset: int) -> bool:
        is_there = ctypes.c_ubyte()
        page = ctypes.c_void_p(self._address + offset - offset % mmap.PAGESIZE)
        return bool(_libc().mincore(page, ctypes.c_size_t(1), ctypes.byref(is_there)) == 0 and is_there.value & 1)

    def read(self, offset: int, num_bytes: int, buffer: _Buffer) -> memoryview:
        """Bytes of the file, in `buffer`."""
        if self.is_from_disk(offset, num_bytes):
            before = offset % _BLOCK_BYTES
            blocks = buffer.room(-(-(before + num_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES)
            try:
                if self._fill_blocks(blocks, offset - before) >= before + num_bytes:
                    return blocks[before : before + num_bytes]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # This file system takes O_DIRECT and not its reads, or wants larger blocks.
            # Else a read came back early, as at the end of the file; what follows says whether that is it.
        found = buffer.room(num_bytes)
        self.fill(found, offset)
        return found

    def _fill_blocks(self, blocks: memoryview, offset: int) -> int:
        """Read whole blocks from the disk; returns how many bytes there were."""
        assert self._direct is not None, "is_from_disk says so"
        done = 0
        while done < len(blocks) and done % _BLOCK_BYTES == 0:
            count = os.preadv(self._direct, [blocks[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def fill(self, into: memoryview, offset: int) -> None:
        """Read as many bytes as `into` has through the system's memory."""
        while into:
            count = os.preadv(self._file, [into], offset)
            if count == 0:
                raise CheckpointError(
                    f"{self._path} became shorter while it was read", hint="write weights, then load them"
                )
            into, offset = into[count:], offset + count


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def whole_tensor(stored: FileTensor) -> Tensor:
    """The tensor as the format's own library maps it: what is touched is read. For columns, and for whole tensors.

    From a cold disk this takes 0.6 to 0.8 of the time of `read_rows`, which is for some of the rows (the library reads
    ahead into those of other ranks: four times as long for a quarter of 20 MB) and for files that may become shorter.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise missing_extra("hf", "reading columns or whole tensors of safetensors files") from error
    with (
        unreadable_as(
            CheckpointError, f"{stored.name} of {stored.file} cannot be read", hint="download the file again"
        ),
        safe_open(stored.file, framework="pt") as opened,
    ):
        found: Tensor = opened.get_tensor(stored.name)
    return found


def _aligned(values: Tensor, stored: FileTensor) -> Tensor:
    """The bytes as elements; a file may have them at an odd offset, where torch cannot read them in place."""
    if (
        values.storage_offset() * values.element_size() % stored.dtype.itemsize
        or values.data_ptr() % stored.dtype.itemsize
    ):
        values = values.clone()
    return values.view(stored.dtype)
