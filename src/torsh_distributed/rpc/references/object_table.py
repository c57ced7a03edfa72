"""The objects of this worker that others refer to."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc.references.leases import LeaseTable


class ObjectTable:
    """The objects of this worker that others, or it itself, hold references to. Any thread."""

    def __init__(self, name: str, lease_s: float, offered: Mapping[str, Any] | None = None) -> None:
        """What is offered needs no holder: it stays."""
        self._name = name
        self._lock = threading.Lock()
        self._objects: dict[str, Future[Any]] = {}
        for key, value in (offered or {}).items():
            self._objects[key] = Future()
            self._objects[key].set_result(value)
        self._leases = LeaseTable(lease_s)
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, value: Any, holder: str) -> str:
        """Keep an object; returns its key."""
        with self._lock:
            self._num_made += 1
            key = f"{self._name}/{self._num_made}"
        self.expect(key, holder).set_result(value)
        return key

    def expect(self, key: str, holder: str) -> Future[Any]:
        """Room for an object that is being made."""
        with self._lock:
            if key in self._objects:
                raise InvalidArgument("an object with this key is here already", key=key)
            future: Future[Any] = Future()
            self._objects[key] = future
            self._leases.hold(key, holder, time.monotonic())
            return future

    def get(self, key: Any) -> Future[Any]:
        """The object, or what making it raised. InvalidArgument if nobody held it any more."""
        found = self._objects.get(key) if isinstance(key, str) else None
        if found is None:
            raise InvalidArgument(
                "the object that this reference means is gone",
                hint="its owner dropped it when no holder had renewed its lease; keep the RRef alive",
                key=str(key)[:100],
            )
        return found

    def holders(self, key: str) -> set[str]:
        """Who holds an object."""
        with self._lock:
            return self._leases.holders(key)

    def renew(self, keys: list[str], holder: str) -> None:
        """A holder still has these, or has them from now on."""
        with self._lock:
            self._leases.renew(keys, holder, time.monotonic())

    def release(self, key: str, holder: str) -> None:
        """A holder gives one up."""
        with self._lock:
            if self._leases.release(key, holder):
                self._objects.pop(key, None)

    def drop_expired(self) -> None:
        """Forget what nobody holds any more."""
        with self._lock:
            for key in self._leases.expired(time.monotonic()):
                self._objects.pop(key, None)
