"""`Keyspace`, the interface below a store, implemented once for each place that can hold keys.

Users hold a `Store` (store.py), which checks arguments, speaks c10d and raises the errors; a keyspace
only moves bytes. All keyspaces keep the contract below, and one test suite checks them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from torsh_distributed.errors import InvalidArgument

MAX_VALUE_BYTES = 100 * 2**20
MAX_KEY_BYTES = 64 * 2**10
DEFAULT_TIMEOUT_S = 30.0

_CANONICAL_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Swap:
    """How a compare-and-swap ended. True exactly if this call did the swap.

    Why not the value alone, as in c10d: two ranks that both swap 5 for 6 both read 6 back, and one update is lost.
    """

    swapped: bool
    value: bytes | None
    """What the key holds after the call: the desired value, or the one that did not match (None: no key)."""

    def __bool__(self) -> bool:
        return self.swapped


class Keyspace(ABC):
    """The keys of one store. Thread-safe; every method is atomic towards all clients of the same store.

    Callers have checked keys and values. A key whose time to live has passed is absent to every method from that
    moment on. Writing with `ttl_s=None` makes a key permanent; `add` and `append` leave its time to live as it is.
    """

    url: str
    """How `open_store` reaches the same keys, without passwords."""

    @abstractmethod
    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        """Write the key."""

    @abstractmethod
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values now, read together, None for an absent key; never waits. Many keys cost one round trip."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove the key; whether it was there."""

    @abstractmethod
    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        """Write `desired` only if the key holds `expected` (None: only if there is no such key)."""

    @abstractmethod
    def add(self, key: str, delta: int) -> int:
        """Add to the decimal number in the key, an absent key counting as 0, and return the sum."""

    @abstractmethod
    def append(self, key: str, suffix: bytes) -> None:
        """Append to the value, an absent key counting as empty."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Return once all keys exist at the same time, or when time is up; the keys still missing, in order."""

    @abstractmethod
    def count(self, prefix: str) -> int:
        """How many keys begin with `prefix`."""

    @abstractmethod
    def close(self) -> None:
        """Release sockets, files and threads. The keys stay for other clients."""

    def cut(self) -> None:
        """End every call that waits, from another thread; it and all later ones raise. Where waits are short: close."""
        self.close()


class PrefixedKeyspace(Keyspace):
    """The keys of another keyspace that begin with `prefix`, under the rest of their names."""

    def __init__(self, inner: Keyspace, prefix: str) -> None:
        self.url = inner.url
        self._inner = inner
        self._prefix = prefix

    @override
    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        self._inner.set(self._prefix + key, value, ttl_s)

    @override
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._inner.get([self._prefix + key for key in keys])

    @override
    def delete(self, key: str) -> bool:
        return self._inner.delete(self._prefix + key)

    @override
    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        return self._inner.compare_and_swap(self._prefix + key, expected, desired, ttl_s)

    @override
    def add(self, key: str, delta: int) -> int:
        return self._inner.add(self._prefix + key, delta)

    @override
    def append(self, key: str, suffix: bytes) -> None:
        self._inner.append(self._prefix + key, suffix)

    @override
    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        missing = self._inner.wait([self._prefix + key for key in keys], timeout_s)
        return [key.removeprefix(self._prefix) for key in missing]

    @override
    def count(self, prefix: str) -> int:
        return self._inner.count(self._prefix + prefix)

    @override
    def close(self) -> None:
        """Nothing: the inner keyspace belongs to the store that opened it."""


def parse_counter(key: str, value: bytes) -> int:
    """The number that `add` counts from: decimal, canonical, 64-bit, as Redis and c10d keep it."""
    if _CANONICAL_INTEGER.fullmatch(value) and int(value) in _INT64:
        return int(value)
    raise not_a_counter(key)


def checked_sum(key: str, value: int, delta: int) -> int:
    """`value + delta`, refused if it leaves 64 bits."""
    if value + delta not in _INT64:
        raise counter_overflow(key, delta)
    return value + delta


def not_a_counter(key: str) -> InvalidArgument:
    """The error for `add` to a text."""
    return InvalidArgument(
        "add needs a key that holds a decimal 64-bit number",
        hint="use one key for the counter and another for the value",
        key=key,
    )


def counter_overflow(key: str, delta: int) -> InvalidArgument:
    """The error for a sum outside 64 bits."""
    return InvalidArgument("the sum does not fit into 64 bits", hint="start a new counter", key=key, delta=delta)


def value_too_large(key: str, num_bytes: int) -> InvalidArgument:
    """The error for a value over the limit."""
    return InvalidArgument(
        f"a value in a store may have {MAX_VALUE_BYTES} bytes at most",
        hint="a store is for meeting points and small records; send tensors with collectives, keep files on disk",
        key=key,
        num_bytes=num_bytes,
    )
