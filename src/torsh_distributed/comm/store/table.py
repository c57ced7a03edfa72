"""Keys with values and expiry in one process's memory: the rules of the contract, written once.

The memory store guards a table with a lock, the TCP server keeps one in its event loop, and the file store
rebuilds one from its log: they agree because they share it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torsh_distributed.comm.store.keyspace import MAX_VALUE_BYTES, Swap, checked_sum, parse_counter, value_too_large


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and when it ends, on the table's clock."""

    value: bytes
    expires_at: float | None = None


class Table:
    """A dict of entries in which an expired key is absent at once and freed at the next write.

    Not thread-safe. `clock` is monotonic seconds; a test brings its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        # (expires_at, key); an entry written anew leaves its old pair behind, which then matches nothing.
        self._expiries: list[tuple[float, str]] = []

    def entry(self, key: str) -> Entry | None:
        """The live entry of the key."""
        entry = self._entries.get(key)
        return None if entry is None or self._is_over(entry) else entry

    def put(self, key: str, entry: Entry | None) -> None:
        """Write an entry as it is, or remove the key with None."""
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
        self.put(key, Entry(value, None if ttl_s is None else self._clock() + ttl_s))

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
        """Add to the number in the key, from 0; the sum."""
        entry = self.entry(key) or Entry(b"0")
        total = checked_sum(key, parse_counter(key, entry.value), delta)
        self.put(key, Entry(str(total).encode(), entry.expires_at))
        return total

    def append(self, key: str, suffix: bytes) -> None:
        """Lengthen the value, from empty."""
        entry = self.entry(key) or Entry(b"")
        num_bytes = len(entry.value) + len(suffix)
        if num_bytes > MAX_VALUE_BYTES:
            raise value_too_large(key, num_bytes)
        self.put(key, Entry(entry.value + suffix, entry.expires_at))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that are absent, in order."""
        return [key for key in keys if self.entry(key) is None]

    def count(self, prefix: str) -> int:
        """How many live keys begin with `prefix`."""
        return sum(key.startswith(prefix) for key, _ in self.items())

    def items(self) -> Iterator[tuple[str, Entry]]:
        """Every live key with its entry."""
        return ((key, entry) for key, entry in self._entries.items() if not self._is_over(entry))

    def _is_over(self, entry: Entry) -> bool:
        return entry.expires_at is not None and entry.expires_at <= self._clock()

    def _free_expired(self) -> None:
        while self._expiries and self._expiries[0][0] <= self._clock():
            _, key = heapq.heappop(self._expiries)
            entry = self._entries.get(key)
            if entry is not None and self._is_over(entry):
                del self._entries[key]
