"""How ranks meet in a store: each publishes a record, reads everyone's until a deadline, and learns who is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torsh_distributed.errors import CommunicationError, OperationTimeout


def wait_for_keys(store: dist.Store, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all keys were set in time. A store that is gone raises DistNetworkError.

    Each store reports a timeout in its own way: TCPStore with DistStoreError, ours with TimeoutError, and torch's
    FileStore with a bare RuntimeError, so that has to count as a timeout too.
    """
    try:
        store.wait(list(keys), timedelta(seconds=max(timeout_s, 0.001)))
    except dist.DistNetworkError:
        raise
    except (RuntimeError, TimeoutError):
        return False
    return True


_LEAVE_S = 5.0
_SETTLE_GRACE_S = 2.0
"""Ranks that wait for rank 0 give it this long beyond the deadline to say who is missing."""


class StoreMeeting:
    """One rank's side of a meeting; all its waits share one deadline.

    Records are JSON under `name/index`; the index is a rank of the group unless the caller numbers them otherwise.
    A wait costs one store round trip and so does reading what it waited for, however many ranks there are.
    """

    def __init__(self, store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float, operation: str) -> None:
        """`operation` is what the ranks meet for, as errors name it."""
        self._store = store
        self._rank = rank
        self._ranks = range(num_ranks)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._operation = operation

    @property
    def remaining_s(self) -> float:
        """The time left to meet, always above zero."""
        return max(self._deadline_s - time.monotonic(), 0.001)

    def exchange(self, name: str, record: object) -> list[Any]:
        """Publish this rank's record and return every rank's, in order. Raises OperationTimeout with who is missing."""
        self.publish(name, self._rank, record)
        return self._read(name, self._ranks)

    def settle(self, name: str, record: object, decide: Callable[[list[Any]], object]) -> Any:
        """Publish this rank's record; every rank returns what rank 0 decided from all. Raises as `exchange` does.

        For thousands of ranks, where few bytes can say what all must know: with `exchange` each reads every record.
        """
        if self._rank == 0:
            try:
                records = [json.loads(json.dumps(record)), *self._read(name, self._ranks[1:])]
                verdict: Any = {"settled": decide(records)}
            except OperationTimeout as error:
                verdict = {"missing": error.context["missing_ranks"]}
            self.publish(f"{name}/settled", 0, verdict)
        else:
            self.publish(name, self._rank, record)
            verdict = self.poll(f"{name}/settled", 0, self.remaining_s + _SETTLE_GRACE_S) or {"missing": [0]}
        if "missing" in verdict:
            self._leave_without(verdict["missing"])
            raise self._too_late(verdict["missing"])
        return verdict["settled"]

    def publish(self, name: str, index: int, record: object) -> None:
        """Set one record."""
        with self._store_errors():
            self._store.set(_key(name, index), json.dumps(record))

    def read(self, name: str, rank: int) -> Any:
        """The record of one rank. Raises OperationTimeout if it is not set in time."""
        return self._read(name, [rank])[0]

    def poll(self, name: str, index: int, timeout_s: float | None = None) -> Any | None:
        """One record, or None if it is not set within `timeout_s`; None: within what remains. Raises ValueError."""
        with self._store_errors():
            key = _key(name, index)
            if not wait_for_keys(self._store, [key], self.remaining_s if timeout_s is None else timeout_s):
                return None
            return json.loads(self._store.get(key))

    def poll_many(self, name: str, indices: Sequence[int], timeout_s: float | None = None) -> list[Any | None]:
        """These records in order, each as `poll` returns it; two round trips if all are there. Raises ValueError."""
        with self._store_errors():
            keys = [_key(name, index) for index in indices]
            there = set(keys)
            if keys and not wait_for_keys(self._store, keys, self.remaining_s if timeout_s is None else timeout_s):
                there = {key for key in keys if self._store.check([key])}
            values = iter(self._store.multi_get([key for key in keys if key in there]) if there else ())
            return [json.loads(next(values)) if key in there else None for key in keys]

    def missing(self, name: str) -> list[int]:
        """The ranks whose record is not set by the deadline."""
        with self._store_errors():
            keys = [_key(name, rank) for rank in self._ranks]
            if wait_for_keys(self._store, keys, self.remaining_s):
                return []
            return [rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])]

    def leave(self) -> None:
        """Stay until every rank has read what it came for, some seconds at most; all call it before they all raise.

        One of them may host the store, and the others would read of a lost store instead of what is wrong.
        """
        self._leave(self._ranks, min(self.remaining_s, _LEAVE_S))

    def _leave_without(self, missing: Sequence[int]) -> None:
        """The same after the deadline: rank 0 stays for those who came."""
        absent = set(missing)
        others = [rank for rank in self._ranks if rank not in absent] if self._rank == 0 else []
        self._leave(others, _SETTLE_GRACE_S)

    def _leave(self, ranks: Sequence[int], timeout_s: float) -> None:
        try:
            self._store.set(_key("left", self._rank), "")
            # A rank that died cannot say that it has read, so the result does not matter.
            if ranks:
                wait_for_keys(self._store, [_key("left", rank) for rank in ranks], timeout_s)
        except dist.DistNetworkError:
            # The host has left, which it does only when this rank was done or the time was over.
            return

    def _read(self, name: str, ranks: Sequence[int]) -> list[Any]:
        with self._store_errors():
            keys = [_key(name, rank) for rank in ranks]
            if not keys:
                return []
            if wait_for_keys(self._store, keys, self.remaining_s):
                return [json.loads(value) for value in self._store.multi_get(keys)]
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
        raise self._too_late(missing)

    def _too_late(self, missing: Sequence[int]) -> OperationTimeout:
        return OperationTimeout(
            f"the group did not come together within {self._timeout_s:g} s; "
            f"missing: {', '.join(f'rank {rank}' for rank in missing) or 'no rank any more, the last came too late'}",
            hint="every rank of the group must create it; look at the output of the missing ones",
            operation=self._operation,
            missing_ranks=list(missing),
            timeout_s=self._timeout_s,
        )

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise CommunicationError(
                "the store went away while the ranks were meeting",
                hint="look at the output of rank 0, which hosts it, or of the launcher",
                operation=self._operation,
                rank=self._rank,
            ) from error


def attempt_store(store: dist.Store, prefix: str, rank: int) -> dist.Store:
    """`store` under a prefix of this attempt to meet: the store may still hold the keys of an earlier one.

    Every rank counts its own attempts, so all must have made the same number.
    """
    return dist.PrefixStore(f"{prefix}/{store.add(f'{prefix}/attempt/{rank}', 1)}", store)


def _key(name: str, index: int) -> str:
    return f"{name}/{index}"
