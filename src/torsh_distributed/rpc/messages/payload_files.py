"""Memory files that carry payloads between two processes of a node: copied once by the sender, mapped by the receiver.

A file is filled again once the receiver's tensors in it are gone: taking new pages takes longer than the copy. The
receiver says so in the file itself, so no message is needed, and it may happen on any thread at any moment.

::

    file = in use (1) | nothing (4095) | parts, each at a multiple of 64

Both ends are processes of one user, and the size is sealed, so no page that is mapped can go away.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from torsh_distributed.comm.transport.frames import BadFrame

_FIRST_PLACE = 4096
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_GRANULE_BYTES = 1 << 20
"""Sizes are rounded up, so a payload that is a little longer finds room."""
_MOST_FILES = 2
"""That one end keeps for a lane: the receiver may hold one payload while the next one comes."""
_MOST_KEPT_BYTES = 256 << 20
_KEPT_S = 5.0


class SentFile:
    """A file of the sender's, closed when nothing refers to it; the receiver's tensors stay as they are."""

    def __init__(self, num_bytes: int) -> None:
        """OSError if there is no memory for it."""
        self.size_bytes = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        self._is_new = True
        self.last_used_s = 0.0
        self.file = os.memfd_create("torsh-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.size_bytes)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        self._mapped = mmap.mmap(self.file, self.size_bytes)

    @property
    def is_free(self) -> bool:
        """Whether the receiver has let go of what was sent."""
        return self._mapped[0] == 0

    def take(self) -> None:
        """It is in use from now on."""
        self._mapped[0] = 1
        self.last_used_s = time.monotonic()

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Copy the parts to their places. OSError if there is no memory for them."""
        places = places_of([len(part) for part in parts])
        if not self._is_new:
            memory = np.frombuffer(self._mapped, dtype=np.uint8)
            for part, place in zip(parts, places, strict=False):
                memory[place : place + len(part)] = np.frombuffer(part, dtype=np.uint8)
            return
        # Pages that are not there yet are made faster by a write, and a lack of them is an error, not a signal.
        for part, place in zip(parts, places, strict=False):
            rest = part
            while rest:
                num_written = os.pwrite(self.file, rest, place + len(part) - len(rest))
                rest = rest[num_written:]
        os.posix_fallocate(self.file, places[-1], self.size_bytes - places[-1])
        self._is_new = False


class PayloadFiles:
    """The sender's files for one lane. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: list[SentFile] = []

    def send(self, parts: Sequence[memoryview]) -> int:
        """A descriptor of a file with these parts; the caller closes it. OSError if there is no memory for one."""
        num_bytes = places_of([len(part) for part in parts])[-1]
        with self._lock:
            found = next((one for one in self._files if one.size_bytes >= num_bytes and one.is_free), None)
            if found is not None:
                self._files.remove(found)
            else:
                found = SentFile(num_bytes)
            found.take()
        found.fill(parts)
        self._keep(found)
        return os.dup(found.file)

    def _keep(self, sent: SentFile) -> None:
        """The newest ones, back or not: the file of a receiver that keeps its tensors becomes its own."""
        with self._lock:
            self._files.append(sent)
            while len(self._files) > _MOST_FILES or sum(one.size_bytes for one in self._files) > _MOST_KEPT_BYTES:
                del self._files[0]

    def drop_idle(self) -> None:
        """Give back what was not used for some seconds."""
        limit_s = time.monotonic() - _KEPT_S
        with self._lock:
            self._files = [one for one in self._files if one.last_used_s >= limit_s]


class ReceivedFiles:
    """The receiver's mappings for one lane: a file that comes again is mapped already. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, int], tuple[mmap.mmap, float]] = {}
        _count_forks()

    def open(self, file: int, num_bytes: int) -> np.ndarray[Any, Any]:
        """The memory of a file that has arrived, of at least `num_bytes`; closes the descriptor.

        The sender may fill it again once the array, and what was made of it, is gone. BadFrame unless it is a memory
        file of this user whose size is sealed.
        """
        try:
            mapped = self._map(file, num_bytes)
        except (OSError, ValueError) as error:
            raise BadFrame(f"a memory file that cannot be mapped: {error}") from error
        finally:
            os.close(file)
        memory: np.ndarray[Any, Any] = np.frombuffer(mapped, dtype=np.uint8)
        weakref.finalize(memory, _give_back, mapped, _num_forks).atexit = False
        return memory

    def _map(self, file: int, num_bytes: int) -> mmap.mmap:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or _seals_of(file) & _SEALS != _SEALS:
            raise BadFrame("a file that is not this user's memory file, or can still be made shorter")
        if status.st_size < num_bytes:
            raise BadFrame("a memory file that is shorter than the tensors it has")
        key = (status.st_dev, status.st_ino)  # of no other file, while it is mapped
        with self._lock:
            mapped, _ = self._mapped.pop(key, (None, 0.0))
            if mapped is None:
                mapped = mmap.mmap(file, status.st_size)
            if status.st_size <= _MOST_KEPT_BYTES:
                self._mapped[key] = mapped, time.monotonic()
            while len(self._mapped) > _MOST_FILES:
                del self._mapped[next(iter(self._mapped))]
        return mapped

    def drop_idle(self) -> None:
        """Forget what did not come again for some seconds: its memory goes with the last tensor in it."""
        limit_s = time.monotonic() - _KEPT_S
        with self._lock:
            self._mapped = {key: found for key, found in self._mapped.items() if found[1] >= limit_s}


def places_of(sizes: Sequence[int]) -> list[int]:
    """Where each part begins in a file, and where the last one ends."""
    places, end = [], _FIRST_PLACE
    for size in sizes:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + size
    return [*places, end]


_num_forks = 0


@functools.cache
def _count_forks() -> None:
    def count() -> None:
        global _num_forks
        _num_forks += 1

    os.register_at_fork(before=count)


def _give_back(mapped: mmap.mmap, num_forks: int) -> None:
    """The receiver's tensors are gone. Takes no lock: it runs wherever the last one is collected.

    Not after a fork: the other process may still have them.
    """
    if num_forks == _num_forks:
        mapped[0] = 0


def _seals_of(file: int) -> int:
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return 0
