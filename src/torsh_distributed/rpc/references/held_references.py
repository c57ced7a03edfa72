"""What this process holds of others' objects: their owners are told while it does, and when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from torsh_distributed.errors import TorshError, translate_errors
from torsh_distributed.rpc.references.object_table import ObjectTable
from torsh_distributed.rpc.references.rref import RRef


class HoldingWorker(Protocol):
    """The worker that holds them."""

    name: str
    objects: ObjectTable
    is_closed: bool

    def call(self, to: str, function: Any, args: Any = (), *, timeout_s: float | None = None) -> Any:
        """Call a function of another worker."""


class HeldReferences:
    """Counts references by owner and key, renews their leases, and keeps what was given away lately. Any thread."""

    def __init__(
        self, worker: HoldingWorker, lease_s: float, run_later: Callable[[Callable[[], None]], object]
    ) -> None:
        """`run_later` runs something on another thread."""
        self._worker = worker
        self._lease_s = lease_s
        self._run_later = run_later
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._given: list[tuple[float, RRef]] = []

    def hold(self, owner: str, key: str) -> None:
        """This process has one more reference to an object."""
        with self._lock:
            self._counts[owner, key] = self._counts.get((owner, key), 0) + 1

    def let_go(self, owner: str, key: str) -> None:
        """One reference less; with the last one the owner is told."""
        with self._lock:
            self._counts[owner, key] -= 1
            if self._counts[owner, key]:
                return
            del self._counts[owner, key]
        if not self._worker.is_closed:
            # On another thread: this one may be in the middle of anything when a reference is collected.
            self._run_later(lambda: self._release(owner, key))

    def give(self, reference: RRef) -> None:
        """Another process will hold this one: keep it for a lease, in which the taker begins to renew it."""
        reference.wait_until_created()
        with self._lock:
            self._given.append((time.monotonic() + self._lease_s, reference))

    def forget_given(self, now_s: float) -> None:
        """Let go of what was given away a lease ago."""
        with self._lock:
            given, self._given = self._given, [entry for entry in self._given if entry[0] > now_s]
        del given  # without the lock, which collected references take

    def renew(self) -> None:
        """Tell owners what this process still holds."""
        for owner, keys in self._by_owner().items():
            if owner == self._worker.name:
                self._worker.objects.renew(keys, owner)
            else:
                self._tell(owner, "@renew", keys)

    def _release(self, owner: str, key: str) -> None:
        if owner == self._worker.name:
            self._worker.objects.release(key, owner)
        else:
            self._tell(owner, "@release", key)

    def _tell(self, owner: str, function: str, argument: Any) -> None:
        try:
            with translate_errors(function):
                self._worker.call(owner, function, (argument,), timeout_s=self._lease_s)
        except TorshError:
            return  # the owner is gone, and the object with it; or this worker is

    def _by_owner(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        with self._lock:
            for owner, key in self._counts:
                found.setdefault(owner, []).append(key)
        return found
