"""Shared memory that is filled through its file.

A new page that is touched is cleared first and mapped; one that is written through the file is neither, which takes a
third less of a processor. It is mapped when somebody reads it.
"""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    import mmap

    from torch import Tensor


class MemoryFile:
    """Memory that all ranks of a node have mapped, with the file behind it until `close`; the memory stays."""

    def __init__(self, mapped: mmap.mmap, file: int, *, start: int) -> None:
        """`file` is what is mapped, and is closed here; the memory begins at byte `start` of it."""
        self.memory = memoryview(mapped)[start:]
        self._start = start
        self._first = int(np.frombuffer(self.memory, dtype=np.uint8).ctypes.data)
        self._file = file
        self.close = weakref.finalize(self, os.close, file)
        """Let go of the file; happens by itself with the last reference."""

    def place_of(self, tensor: Tensor) -> int | None:
        """Where a tensor begins in this memory; None if it is elsewhere. It must be contiguous."""
        place = tensor.data_ptr() - self._first
        return place if tensor.device.type == "cpu" and 0 <= place <= len(self.memory) - tensor.nbytes else None

    def write(self, data: memoryview, place: int) -> None:
        """Write bytes from `place` on. OSError if there is no memory for them."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self._start + place + done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
