"""The store in a file: processes of one node, or of several on a shared POSIX file system, meet in a log.

Reading takes no lock: records are checksummed and appear whole. Writing takes the lock `PATH.lock`, which the kernel
releases when its holder dies. Closing the lock file wakes waiting processes through inotify; changes made by other
nodes raise no such event, so a waiting process also checks every 50 ms.

Wake up when another process closes a file: inotify, through the C library.
Without inotify (or with no instance left), and for changes by other nodes on a network file system, a wait lasts its
full time; callers keep it short and check again.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from typing_extensions import override

from torsh_distributed.comm.store.file_log import DamagedLog, FileLog
from torsh_distributed.comm.store.keyspace import Keyspace, Swap
from torsh_distributed.comm.store.table import Table
from torsh_distributed.errors import IoError, OperationTimeout, TorshError

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


T = TypeVar("T")

_RECHECK_S = 0.05


class FileKeyspace(Keyspace):
    """A `FileLog` with a lock around each change and a table in memory for each process that has it open.

    The file is created with mode 0600 and outlives the processes: to start over, delete it or use another prefix. A
    value survives its writer's death, but an unsynced one does not survive a power cut.
    """

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self.url = path.absolute().as_uri()
        self._timeout_s = timeout_s
        self._lock_path = path.with_name(path.name + ".lock")
        self._mutex = threading.Lock()
        self._log = FileLog(path)
        with self._exclusive():
            pass  # checks that the directory can be written and that the file is a store

    @override
    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        self._change(key, lambda table: table.set(key, value, ttl_s))

    @override
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._look(lambda table: [table.get(key) for key in keys])

    @override
    def delete(self, key: str) -> bool:
        return self._change(key, lambda table: table.delete(key))

    @override
    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        return self._change(key, lambda table: table.compare_and_swap(key, expected, desired, ttl_s))

    @override
    def add(self, key: str, delta: int) -> int:
        return self._change(key, lambda table: table.add(key, delta))

    @override
    def append(self, key: str, suffix: bytes) -> None:
        self._change(key, lambda table: table.append(key, suffix))

    @override
    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        missing = self._look(lambda table: table.missing(keys))
        if not missing or timeout_s <= 0:
            return missing
        # Watching starts before the next check, so a write between the two is not missed.
        with FileWatch(self._lock_path) as watch:
            while missing := self._look(lambda table: table.missing(keys)):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                watch.wait(min(remaining_s, _RECHECK_S))
        return missing

    @override
    def count(self, prefix: str) -> int:
        return self._look(lambda table: table.count(prefix))

    @override
    def close(self) -> None:
        with self._held_mutex():
            self._log.forget()

    def _look(self, question: Callable[[Table], T]) -> T:
        """Answer from the table, brought up to date without the lock."""
        try:
            with self._held_mutex(), self._reported():
                self._log.refresh()
                return question(self._log.table)
        except DamagedLog:
            # It may be a torn record that a writer is replacing right now: holding the lock decides.
            with self._exclusive():
                return question(self._log.table)

    def _change(self, key: str, action: Callable[[Table], T]) -> T:
        """Apply the action to the table under the lock, and log the key if it changed."""
        with self._exclusive():
            before = self._log.table.entry(key)
            result = action(self._log.table)
            after = self._log.table.entry(key)
            if after is not before:
                self._log.append(key, after)
            return result

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock against all processes and threads, with the table up to date and the log repaired."""
        with self._held_mutex(), self._reported():
            fd = self._lock()
            try:
                self._log.refresh()
                self._log.repair()
                yield
            except DamagedLog as error:
                raise IoError(
                    "the store's file is damaged",
                    hint="delete it and restart the job; if it happens again, check the disk",
                    path=str(self._log.path),
                ) from error
            finally:
                os.close(fd)

    def _lock(self) -> int:
        """A descriptor of the lock file that holds the lock; closing it releases the lock and wakes the waiting."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._await_lock(fd, deadline)
                if self._lock_path.exists() and os.path.samestat(os.fstat(fd), self._lock_path.stat()):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the file was deleted since it was opened, so its lock excludes no one

    def _await_lock(self, fd: int, deadline: float) -> None:
        if _try_lock(fd):
            return
        with FileWatch(self._lock_path) as watch:
            # The descriptor stays open between attempts: closing it would wake all other processes in vain.
            while not _try_lock(fd):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise OperationTimeout(
                        "another process holds the lock of the file store and does not release it",
                        hint="`lslocks` names the process; it may be stopped, or its disk may hang",
                        operation="lock",
                        path=str(self._lock_path),
                        timeout_s=self._timeout_s,
                    )
                watch.wait(min(remaining_s, _RECHECK_S))

    @contextmanager
    def _held_mutex(self) -> Iterator[None]:
        if not self._mutex.acquire(timeout=min(self._timeout_s, threading.TIMEOUT_MAX)):
            raise OperationTimeout(
                "another thread of this process is busy with the file store",
                operation="lock",
                path=str(self._log.path),
                timeout_s=self._timeout_s,
            )
        try:
            yield
        finally:
            self._mutex.release()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except TorshError:
            raise
        except OSError as error:
            raise IoError(
                f"the file store cannot be used: {error.strerror}",
                hint="the directory must exist and be writable, with space left, for every process of the job",
                path=str(self._log.path),
                errno=error.errno,
            ) from error


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
