"""Keys with values and expiry in one process's memory: the store contract, implemented once.

The memory store guards a table with a lock, the TCP server keeps one in its event loop, and the file store rebuilds one
from its log, so they behave alike.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torsh_distributed.comm.store.keyspace import MAX_VALUE_BYTES, Swap, checked_sum, parse_counter, value_too_large


@dataclass(slots=True)
class StoredValue:
    """A value and when it expires, on the table's clock."""

    value: bytes
    expires_at: float | None = None


class Table:
    """A dict of entries in which an expired key is absent at once and freed at the next write.

    Not thread-safe. `clock` is monotonic seconds; a test brings its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, StoredValue] = {}
        # (expires_at, key); rewriting an entry leaves its old pair here, which then matches nothing.
        self._expiries: list[tuple[float, str]] = []

    def entry(self, key: str) -> StoredValue | None:
        """The live entry of the key."""
        entry = self._entries.get(key)
        return None if entry is None or self._is_over(entry) else entry

    def put(self, key: str, entry: StoredValue | None) -> None:
        """Write an entry unchanged, or remove the key with None."""
        self._free_expired()
        if entry is None:
            self._entries.pop(key, None)
            return
        self._entries[key] = entry
        if entry.expires_at is not None:
            heapq.heappush(self._expiries, (entry.expires_at, key))

    def get(self, key: str) -> bytes | None:
        """The value now, or None."""
        entry = self.entry(key)
        return None if entry is None else entry.value

    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        """Write the key."""
        self.put(key, StoredValue(value, None if ttl_s is None else self._clock() + ttl_s))

    def delete(self, key: str) -> bool:
        """Remove the key; whether it was there."""
        existed = self.entry(key) is not None
        self.put(key, None)
        return existed

    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        """Write `desired` only if the key holds `expected` (None: only if there is no such key)."""
        current = self.get(key)
        if current != expected:
            return Swap(False, current)
        self.set(key, desired, ttl_s)
        return Swap(True, desired)

    def add(self, key: str, delta: int) -> int:
        """Add to the number in the key, which starts at 0, and return the sum."""
        entry = self.entry(key) or StoredValue(b"0")
        total = checked_sum(key, parse_counter(key, entry.value), delta)
        self.put(key, StoredValue(str(total).encode(), entry.expires_at))
        return total

    def append(self, key: str, suffix: bytes) -> None:
        """Append to the value, which starts empty."""
        entry = self.entry(key) or StoredValue(b"")
        num_bytes = len(entry.value) + len(suffix)
        if num_bytes > MAX_VALUE_BYTES:
            raise value_too_large(key, num_bytes)
        self.put(key, StoredValue(entry.value + suffix, entry.expires_at))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """The absent ones of `keys`, in order."""
        return [key for key in keys if self.entry(key) is None]

    def count(self, prefix: str) -> int:
        """How many live keys begin with `prefix`."""
        return sum(key.startswith(prefix) for key, _ in self.items())

    def items(self) -> Iterator[tuple[str, StoredValue]]:
        """Every live key with its entry."""
        return ((key, entry) for key, entry in self._entries.items() if not self._is_over(entry))

    def _is_over(self, entry: StoredValue) -> bool:
        return entry.expires_at is not None and entry.expires_at <= self._clock()

    def _free_expired(self) -> None:
        while self._expiries and self._expiries[0][0] <= self._clock():
            _, key = heapq.heappop(self._expiries)
            entry = self._entries.get(key)
            if entry is not None and self._is_over(entry):
                del self._entries[key]
