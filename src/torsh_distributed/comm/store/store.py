"""`Store`: the key-value service through which ranks meet, which is also a `torch.distributed.Store`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self, cast
from weakref import WeakSet

import torch.distributed as dist
from typing_extensions import override

from torsh_distributed.comm.store.keyspace import (
    DEFAULT_TIMEOUT_S,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Keyspace,
    PrefixedKeyspace,
    Swap,
    value_too_large,
)
from torsh_distributed.errors import InvalidArgument, OperationTimeout

# Thirty years: longer than any job, and within the range of every clock, socket and server.
_LONGEST_S = 1e9

# c10d keeps only the C++ half of a store it is given; when Python drops the other half, every later call inside
# c10d fails. So an open store is kept here until it is closed. Drop this once torch keeps the Python half alive itself.
_open_stores: set[Store] = set()


class StoreTimeout(OperationTimeout, dist.DistStoreError):
    """Keys did not appear in time. Also a DistStoreError: c10d's own retry loops catch that and nothing else."""


class Store(dist.Store):
    """Keys and values shared by ranks; `open_store` makes one.

    Values are bytes (text is encoded as UTF-8), 100 MiB at most, and are never unpickled. Every method is
    atomic and may be called from any thread. Being a c10d store, it goes into
    `torch.distributed.init_process_group(store=...)`; the lower part of the class is what c10d calls.
    """

    def __init__(self, keys: Keyspace, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=_seconds(timeout_s)))
        self._keyspace = keys
        self._views: WeakSet[Store] = WeakSet()
        _open_stores.add(self)

    @property
    def url(self) -> str:
        """What another process passes to `open_store` to reach the same keys (without a password)."""
        return self._keyspace.url

    @override
    def set(self, key: str, value: bytes | str, *, ttl_s: float | None = None) -> None:
        """Write the key. With `ttl_s` it expires for all clients after that many seconds, on the store's clock."""
        self._keys.set(_key(key), _value(key, value), _ttl_s(ttl_s))

    @override
    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """The value, waiting for the key to appear; StoreTimeout after `timeout_s` (None: the store's timeout)."""
        (value,) = self._get([key], self._limit_s(timeout_s))
        return value

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Return once all keys exist; StoreTimeout, naming the missing ones, after `timeout` (seconds or timedelta)."""
        self._await(keys, time.monotonic() + self._limit_s(timeout))

    def contains(self, key: str) -> bool:
        """Whether the key exists now."""
        return self.check([key])

    def delete(self, key: str) -> bool:
        """Remove the key; whether it was there."""
        return self._keys.delete(_key(key))

    @override
    def num_keys(self) -> int:
        """How many keys this store, or this prefix of it, holds now."""
        return self._keys.count("")

    def compare_and_swap(
        self, key: str, expected: bytes | str | None, desired: bytes | str, *, ttl_s: float | None = None
    ) -> Swap:
        """Write `desired` only if the key holds `expected`; None expects that there is no such key.

        The result is true if this call wrote; otherwise nothing changed and `.value` is what the key holds.
        """
        wanted = None if expected is None else _value(key, expected)
        return self._keys.compare_and_swap(_key(key), wanted, _value(key, desired), _ttl_s(ttl_s))

    @override
    def add(self, key: str, value: int) -> int:
        """Add to a counter, which starts at 0, and return the sum. The counter reads as decimal text."""
        if not -(2**63) <= value < 2**63:
            raise InvalidArgument("add takes a 64-bit number", key=key, value=value)
        return self._keys.add(_key(key), value)

    def prefix(self, name: str) -> Store:
        """The keys that begin with `name/`, as a store of their own; it is closed with this one.

        Same naming as torch's PrefixStore: key "b" here is key "name/b" there.
        """
        return self._view(f"{_key(name)}/")

    def cut(self) -> None:
        """From any thread: calls that wait for the server, and all later ones, raise CommunicationError."""
        self._keyspace.cut()

    def close(self) -> None:
        """Release sockets, files and threads; the keys stay for others. Closing twice is allowed."""
        if self not in _open_stores:
            return
        for view in list(self._views):
            view.close()
        _open_stores.discard(self)
        self._keyspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def _keys(self) -> Keyspace:
        if self not in _open_stores:
            raise InvalidArgument("the store is closed", hint="open it again with open_store(...)", url=self.url)
        return self._keyspace

    def _view(self, prefix: str) -> Store:
        view = Store(PrefixedKeyspace(self._keys, prefix), timeout_s=self._limit_s(None))
        self._views.add(view)
        return view

    def _limit_s(self, timeout: timedelta | float | None) -> float:
        if timeout is None:
            # c10d may change it without a call to this class (set_timeout is not virtual), so it is read each time.
            timeout = cast(timedelta, self.timeout)  # type: ignore[attr-defined]  # missing in torch's stubs
        return _seconds(timeout)

    def _get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of all keys at one moment; usually they are there already and one read is enough."""
        deadline = time.monotonic() + timeout_s
        names = _names(keys)
        while names:
            values = self._keys.get(names)
            found = [value for value in values if value is not None]
            if len(found) == len(names):
                return found
            self._await(names, deadline)
        return []

    def _await(self, keys: Sequence[str], deadline: float) -> None:
        names = _names(keys)
        missing = self._keys.wait(names, max(0.0, deadline - time.monotonic()))
        if missing:
            raise StoreTimeout(
                f"{len(missing)} of {len(names)} keys did not appear in time",
                hint="find out why the rank that should set them did not, or raise the timeout",
                operation="wait",
                missing_keys=missing[:20],
                store=self.url,
            )

    # What c10d calls. Its C++ looks up the camel-case names on a Python store.

    @override
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        return not self._keys.wait(_names(keys), 0.0)

    @override
    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """compare_and_swap in c10d's terms: empty expects no key; the answer is what is there, or `expected_value`."""
        expected = _value(key, expected_value)
        swap = self.compare_and_swap(key, expected or None, desired_value)
        if not swap and not expected and swap.value == b"":
            swap = self.compare_and_swap(key, b"", desired_value)
        return expected if swap.value is None else swap.value

    def append(self, key: str, value: bytes | str) -> None:
        """Append to the value, which starts empty."""
        self._keys.append(_key(key), _value(key, value))

    @override
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, waiting for them under one deadline."""
        return self._get(keys, self._limit_s(None))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write several keys, one after the other."""
        if len(keys) != len(values):
            raise InvalidArgument("multi_set takes as many values as keys", num_keys=len(keys), num_values=len(values))
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set work."""
        return True

    def clone(self) -> Store:
        """A second handle on the same keys, with its own timeout."""
        return self._view("")

    @override
    def delete_key(self, key: str) -> bool:
        """Same as `delete`, under c10d's name."""
        return self.delete(key)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name c10d's C++ looks up
        """Same as `delete`."""
        return self.delete(key)

    def getNumKeys(self) -> int:  # noqa: N802 - the name c10d's C++ looks up
        """Same as `num_keys`."""
        return self.num_keys()


def _key(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise InvalidArgument("a key is a text of at least one character", key=key)
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument("a key must be valid Unicode", hint="encode raw bytes as hex", key=repr(key)) from error
    if num_bytes > MAX_KEY_BYTES:
        raise InvalidArgument(
            f"a key may have {MAX_KEY_BYTES} bytes at most",
            hint="use a hash of it",
            key=f"{key[:40]}…",
            num_bytes=num_bytes,
        )
    return key


def _names(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise InvalidArgument("several keys are a list of texts", hint=f"write [{keys!r}]", keys=keys)
    return [_key(key) for key in keys]


def _value(key: str, value: bytes | str) -> bytes:
    if not isinstance(value, bytes | str | bytearray | memoryview):
        raise InvalidArgument(
            "a value is bytes or text",
            hint="encode it, for example with json.dumps; objects are never pickled",
            key=key,
            type=type(value).__name__,
        )
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MAX_VALUE_BYTES:
        raise value_too_large(key, len(data))
    return data


def _ttl_s(ttl_s: float | None) -> float | None:
    if ttl_s is not None and not 0 < ttl_s <= _LONGEST_S:
        raise InvalidArgument(
            f"a time to live is above 0 and at most {_LONGEST_S:g} seconds",
            hint="None keeps the key forever",
            ttl_s=ttl_s,
        )
    return ttl_s


def _seconds(timeout: timedelta | float) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if math.isnan(seconds) or seconds < 0:
        raise InvalidArgument("a timeout is 0 or more seconds", hint="0 asks once without waiting", timeout_s=seconds)
    return min(seconds, _LONGEST_S)
