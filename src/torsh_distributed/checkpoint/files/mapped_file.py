"""A file that is verified and then loaded, and read from the disk once.

Every `read` copies bytes out of the kernel's memory, which takes as long as some disks do. A mapped file is hashed
where it lies, while the disk reads what follows, and is then copied once, to where it belongs. The memory is the
kernel's own cache of the file, which it takes back when it needs it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POPULATE_READ = 22
"""MADV_POPULATE_READ, from Linux 5.14: read and map pages, and report what cannot be read. Touching a page that cannot
be read would end the process."""


def open_plain(path: Path) -> int:
    """A descriptor to read a regular file from; OSError for a link, a pipe, a device or a directory."""
    # Non-blocking: opening a pipe that nobody writes to would wait for ever. It means nothing to a regular file.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("it is not a regular file")
    return file


class MappedFile:
    """A file opened for reading; links are not followed. Where it cannot be mapped it is read into a buffer."""

    def __init__(self, path: Path) -> None:
        self._file = open_plain(path)
        self.close = weakref.finalize(self, os.close, self._file)
        """Let go of the file; happens by itself with the last reference."""
        self.num_bytes = os.fstat(self._file).st_size
        self._map = _mapped(self._file, self.num_bytes)
        self._address = 0 if self._map is None else _address(self._map)
        self._buffer = bytearray()

    def start_reading(self, start: int, stop: int) -> None:
        """Let the disk read these bytes while others are used; a hint."""
        os.posix_fadvise(self._file, start, stop - start, os.POSIX_FADV_WILLNEED)

    def view(self, start: int, stop: int) -> memoryview:
        """These bytes, read by now; valid until the next call. OSError if they cannot be read."""
        if self._map is not None and self._populate(start, stop):
            return memoryview(self._map)[start:stop]
        if len(self._buffer) < stop - start:
            self._buffer = bytearray(stop - start)
        found = memoryview(self._buffer)[: stop - start]
        read_exactly(self._file, found, start)
        return found

    def read_into(self, into: memoryview, start: int, copy: Callable[[memoryview, memoryview], None]) -> None:
        """Fill `into` from position `start` of the file, by `copy(into, source)`. OSError if it cannot be read."""
        if self._map is not None and self._populate(start, start + len(into)):
            copy(into, memoryview(self._map)[start : start + len(into)])
        else:
            read_exactly(self._file, into, start)

    def _populate(self, start: int, stop: int) -> bool:
        """Whether the pages of these bytes are in memory, read if need be; if not, reading them says why."""
        # The size now: the kernel may keep pages beyond the end of a file that was cut, and they may not be touched.
        if not start < stop <= min(self.num_bytes, os.fstat(self._file).st_size):
            return False
        first = start - start % mmap.PAGESIZE
        place, length = ctypes.c_void_p(self._address + first), ctypes.c_size_t(stop - first)
        # Asking is a hundred times quicker than populating what is there.
        is_there = ctypes.create_string_buffer(-(-(stop - first) // mmap.PAGESIZE))
        if _libc().mincore(place, length, is_there) == 0 and b"\0" not in is_there.raw:
            return True
        # Not mmap.madvise: it holds the interpreter while the disk reads.
        return bool(_libc().madvise(place, length, _POPULATE_READ) == 0)


def _mapped(file: int, num_bytes: int) -> mmap.mmap | None:
    """The file in memory; None where that cannot be, as for an empty file and on some network file systems."""
    try:
        return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None


def _address(mapped: mmap.mmap) -> int:
    import numpy as np  # here, not above: most commands map nothing

    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def read_exactly(file: int, into: memoryview, start: int) -> None:
    """Fill `into` from position `start` of a file; OSError if the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], start + done)
        if count == 0:
            raise OSError(f"the file ends at byte {start + done}")
        done += count
