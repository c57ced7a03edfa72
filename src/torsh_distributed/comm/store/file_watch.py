"""Wake up when another process lets go of a file: inotify, through the C library.

Where there is no inotify (or no instance left), and on a network file system for what other nodes do, a wait
simply lasts its full time; callers keep it short and look again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_IN_CLOSE_WRITE = 0x8
_MOST_EVENTS_BYTES = 64 * struct.calcsize("iIII")


class FileWatch:
    """Notices each time a process closes `path` after having it open for writing, from construction on."""

    def __init__(self, path: Path) -> None:
        self._fd = _watch(path)

    def wait(self, timeout_s: float) -> None:
        """Return at the next close, or at once if there was one since the last call; at the latest after timeout_s."""
        if self._fd is None:
            threading.Event().wait(timeout_s)
            return
        if select.select([self._fd], [], [], timeout_s)[0]:
            os.read(self._fd, _MOST_EVENTS_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _watch(path: Path) -> int | None:
    libc = _libc()
    if not hasattr(libc, "inotify_init1"):
        return None
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        return None
    if libc.inotify_add_watch(fd, os.fsencode(path), _IN_CLOSE_WRITE) < 0:
        os.close(fd)
        return None
    return fd
