"""Wake up when another process closes a file: inotify, through the C library.

Without inotify (or with no instance left), and for changes by other nodes on a network file system, a wait lasts its
full time; callers keep it short and check again.
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
    """Watches `path`, from construction on, for processes that close it after having it open for writing."""

    def __init__(self, path: Path) -> None:
        self._fd = _watch(path)

    def wait(self, timeout_s: float) -> None:
        """Return at the next close, at once if there was one since the last call, or after `timeout_s`."""
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
