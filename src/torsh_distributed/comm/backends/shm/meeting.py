"""How the ranks of a shm group meet in the store: who is where, who has which core, and where the segment is.

Every step is a value in the store that all ranks read, so all reach the same verdict: if one rank cannot take
part, the others raise the same error instead of waiting for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torsh_distributed.comm.backends.shm.segment import Segment, SegmentAddress
from torsh_distributed.errors import BackendError, CommunicationError, InvalidArgument, OperationTimeout, TorshError


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a rank says of itself."""

    pid: int
    home: str
    """Equal for ranks that can share memory: one kernel, one process namespace, one network."""
    cores: list[int]
    """The cores it may run on."""
    native_version: int
    """Of the compiled core; 0 where none was built or it is not wanted."""

    @classmethod
    def here(cls, native_version: int) -> Member:
        """This process."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(pid=os.getpid(), home=_home(), cores=cores, native_version=native_version)


def _home() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net")]
    return ":".join([boot, *spaces])


class Meeting:
    """One rank's side of the meeting. Keys carry the attempt: a store may still hold those of an earlier one."""

    def __init__(self, store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        attempt = store.add(f"shm/attempt/{rank}", 1)
        self._store = dist.PrefixStore(f"shm/{attempt}", store)

    def members(self, me: Member) -> list[Member]:
        """Say who is here and learn who else is; raises on every rank if they cannot share memory."""
        self._store.set(f"member/{self._rank}", json.dumps(asdict(me)))
        members = [Member(**entry) for entry in self._read_all("member")]
        apart = [rank for rank, member in enumerate(members) if member.home != members[0].home]
        if apart:
            raise InvalidArgument(
                "the shm backend joins ranks of one node, and some are elsewhere",
                hint="use backend='torsh' or 'gloo' for groups that span nodes",
                backend="shm",
                rank_0_at=members[0].home,
                ranks_elsewhere=apart,
            )
        return members

    def share(self, create: Callable[[], tuple[Segment, SegmentAddress]]) -> Segment:
        """Make the segment on rank 0 and map it everywhere; raises on every rank if one cannot."""
        error: TorshError | None = None
        segment: Segment | None = None
        try:
            segment = self._create(create) if self._rank == 0 else self._open()
            segment.lock(self._rank)
        except TorshError as raised:
            error = raised
        self._store.set(f"mapped/{self._rank}", json.dumps({"error": str(error) if error else None}))
        failures = {rank: entry["error"] for rank, entry in enumerate(self._read_all("mapped")) if entry["error"]}
        if error is not None or segment is None:
            raise error if error is not None else AssertionError("a segment or an error")
        if failures:
            segment.close()
            first = min(failures)
            raise BackendError(
                f"rank {first} cannot take part in the group: {failures[first].splitlines()[0]}",
                hint="look at that rank's error",
                backend="shm",
                failed_ranks=sorted(failures),
            )
        return segment

    def _create(self, create: Callable[[], tuple[Segment, SegmentAddress]]) -> Segment:
        try:
            segment, address = create()
        except TorshError:
            self._store.set("segment", json.dumps(None))
            raise
        self._store.set("segment", json.dumps(asdict(address)))
        return segment

    def _open(self) -> Segment:
        self._wait(["segment"], [0])
        entry = json.loads(self._store.get("segment"))
        if entry is None:
            raise BackendError(
                "rank 0 could not make the shared memory", hint="look at that rank's error", backend="shm"
            )
        return Segment.open(SegmentAddress(**entry))

    def _read_all(self, kind: str) -> list[Any]:
        keys = [f"{kind}/{rank}" for rank in range(self._num_ranks)]
        self._wait(keys, list(range(self._num_ranks)))
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait(self, keys: list[str], ranks: list[int]) -> None:
        remaining_s = max(self._deadline - time.monotonic(), 0.001)
        try:
            self._store.wait(keys, timedelta(seconds=remaining_s))
        except dist.DistNetworkError as error:
            raise CommunicationError(
                "the store went away while the group was being made",
                hint="look at the output of rank 0, which hosts it, or of the launcher",
                operation="create the shm group",
                rank=self._rank,
            ) from error
        except RuntimeError as error:  # stores differ in what they raise at the deadline
            missing = [rank for key, rank in zip(keys, ranks, strict=True) if not self._store.check([key])]
            raise OperationTimeout(
                f"the group did not come together within {self._timeout_s:g} s; "
                f"missing: {', '.join(f'rank {rank}' for rank in missing) or 'nobody any more'}",
                hint="every rank of the group must create it; look at the output of the missing ones",
                operation="create the shm group",
                missing_ranks=missing,
                timeout_s=self._timeout_s,
            ) from error
