"""The store of one process: its threads meet in a table under a lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from typing_extensions import override

from torsh_distributed.comm.store.keyspace import Keyspace, Swap
from torsh_distributed.comm.store.table import Table


class MemoryKeyspace(Keyspace):
    """A table under a condition variable; a write wakes all waiting threads."""

    url = "memory://"

    def __init__(self) -> None:
        self._table = Table()
        self._changed = threading.Condition()

    @override
    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        with self._changed:
            self._table.set(key, value, ttl_s)
            self._changed.notify_all()

    @override
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._changed:
            return [self._table.get(key) for key in keys]

    @override
    def delete(self, key: str) -> bool:
        with self._changed:
            return self._table.delete(key)

    @override
    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        with self._changed:
            swap = self._table.compare_and_swap(key, expected, desired, ttl_s)
            self._changed.notify_all()
            return swap

    @override
    def add(self, key: str, delta: int) -> int:
        with self._changed:
            total = self._table.add(key, delta)
            self._changed.notify_all()
            return total

    @override
    def append(self, key: str, suffix: bytes) -> None:
        with self._changed:
            self._table.append(key, suffix)
            self._changed.notify_all()

    @override
    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        with self._changed:
            limit_s = min(timeout_s, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: not self._table.missing(keys), limit_s)
            return self._table.missing(keys)

    @override
    def count(self, prefix: str) -> int:
        with self._changed:
            return self._table.count(prefix)

    @override
    def close(self) -> None:
        """Nothing to do: only memory is held."""
