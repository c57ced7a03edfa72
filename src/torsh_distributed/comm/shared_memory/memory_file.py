"""Shared memory that several ranks fill at the same time.

A `write` to its file would neither clear nor map new pages and take a third less of a processor, but a file takes one
at a time, whoever writes: two ranks filled it at half the speed. So pages are made first, many with one call, and bytes
are then copied to them.

Memory that outlives the process that filled it: files in a directory in /dev/shm that the launcher owns.
`torsh run` makes the directory when it may start workers again, names it in TORSH_KEPT_MEMORY, and removes it at the
end of the job, as its guardian does if the launcher itself is killed. Workers put there what the next attempt needs.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor


KEPT_MEMORY_VARIABLE = "TORSH_KEPT_MEMORY"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself


def make_kept_memory() -> Path | None:
    """A new directory, private to this user; None where there is no shared memory to write to."""
    try:
        return Path(tempfile.mkdtemp(prefix="torsh-kept-", dir=_SHARED_MEMORY))
    except OSError:
        return None


def kept_memory() -> Path | None:
    """The job's directory, for a worker that the launcher may start again."""
    path = os.environ.get(KEPT_MEMORY_VARIABLE)
    return Path(path) if path else None


def map_new(path: Path, num_bytes: int) -> Tensor | None:
    """A new file of `num_bytes` as a tensor of bytes; None if there is no room for it."""
    import torch

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Room is taken now: a page that cannot be had later would end the process with SIGBUS.
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        return None
    finally:
        os.close(file)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def map_existing(path: Path, num_bytes: int) -> Tensor:
    """The file of an earlier process; OSError if it is not there or not as long as it was."""
    import torch

    if path.stat().st_size != num_bytes:
        raise OSError(errno.EIO, f"{path.name} has {path.stat().st_size} bytes instead of {num_bytes}")
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, from Linux 5.14: make pages, and report if there is no memory for them. Touching one that cannot
be made would end the process."""


def _address_of(data: memoryview) -> int:
    import numpy as np  # the launcher uses this module too, and starts faster without

    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


class MemoryFile:
    """Memory that all ranks of a node have mapped, with the file behind it until `close`; the memory stays."""

    def __init__(self, mapped: mmap.mmap, file: int, *, start: int) -> None:
        """`file` is what is mapped, and is closed here; the memory begins at byte `start` of it."""
        self.memory = memoryview(mapped)[start:]
        self._start = start
        self._first = _address_of(self.memory)
        self._file = file
        self.close = weakref.finalize(self, os.close, file)
        """Let go of the file; happens by itself with the last reference."""

    def place_of(self, tensor: Tensor) -> int | None:
        """Where a tensor begins in this memory; None if it is elsewhere. It must be contiguous."""
        place = tensor.data_ptr() - self._first
        return place if tensor.device.type == "cpu" and 0 <= place <= len(self.memory) - tensor.nbytes else None

    def write(self, data: memoryview, place: int) -> None:
        """Write bytes from `place` on. OSError if there is no memory for them."""
        start = self._first + place
        begin = start - start % mmap.PAGESIZE
        # Both without the interpreter's lock, which mmap.madvise and a copy between memoryviews would hold.
        if _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(start + len(data) - begin), _POPULATE_WRITE) == 0:
            ctypes.memmove(start, _address_of(data), len(data))
            return
        # An older kernel; or no memory, which the file says in words.
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self._start + place + done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)
