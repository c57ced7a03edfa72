"""How the ranks of a shm group meet in the store: who is where, who has which core, and where the segment is.

All ranks read the same records, so all reach the same conclusion: if one rank cannot take part, the others raise an
error instead of waiting for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from torsh_distributed.comm.backends.shm.segment import SegmentAddress, SharedSegment
from torsh_distributed.comm.meeting.node_identity import node_identity
from torsh_distributed.comm.meeting.store_meeting import StoreMeeting, attempt_store
from torsh_distributed.errors import BackendError, InvalidArgument, TorshError


@dataclass(frozen=True, kw_only=True)
class ShmMember:
    """What a rank publishes about itself."""

    pid: int
    node: str
    """Equal for ranks that can share memory."""
    cores: list[int]
    """The cores it may run on."""
    native_version: int
    """Version of the compiled core; 0 if none was built or it is not wanted."""

    @classmethod
    def here(cls, native_version: int) -> ShmMember:
        """This process."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(pid=os.getpid(), node=node_identity(), cores=cores, native_version=native_version)


class ShmMeeting:
    """One rank's side of the meeting."""

    def __init__(self, store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._rank = rank
        self._meeting = StoreMeeting(
            attempt_store(store, "shm", rank),
            rank=rank,
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            operation="create the shm group",
        )

    def exchange(self, me: ShmMember) -> list[ShmMember]:
        """Every rank's record; raises on every rank if they cannot share memory."""
        members = [ShmMember(**entry) for entry in self._meeting.exchange("member", asdict(me))]
        apart = [rank for rank, member in enumerate(members) if member.node != members[0].node]
        if apart:
            self._meeting.leave()
            raise InvalidArgument(
                "the shm backend joins ranks of one node that see each other's processes, and some are elsewhere",
                hint="use backend='torsh' (memory where ranks share it, gloo elsewhere) or 'gloo'",
                backend="shm",
                rank_0_at=members[0].node,
                ranks_elsewhere=apart,
            )
        return members

    def share(self, create: Callable[[], tuple[SharedSegment, SegmentAddress]]) -> SharedSegment:
        """Create the segment on rank 0 and map it everywhere; raises on every rank if one cannot."""
        error: TorshError | None = None
        segment: SharedSegment | None = None
        try:
            segment = self._create(create) if self._rank == 0 else self._open()
            segment.lock(self._rank)
        except TorshError as raised:
            error = raised
        errors = self._meeting.exchange("mapped", str(error) if error else None)
        if any(errors):
            self._meeting.leave()
        if error is not None or segment is None:
            raise error if error is not None else AssertionError("a segment or an error")
        failed = [rank for rank, text in enumerate(errors) if text]
        if failed:
            segment.close()
            raise BackendError(
                f"rank {failed[0]} cannot take part in the group: {errors[failed[0]].splitlines()[0]}",
                hint="look at that rank's error",
                backend="shm",
                failed_ranks=failed,
            )
        return segment

    def _create(self, create: Callable[[], tuple[SharedSegment, SegmentAddress]]) -> SharedSegment:
        try:
            segment, address = create()
        except TorshError:
            self._meeting.publish("segment", 0, None)
            raise
        self._meeting.publish("segment", 0, asdict(address))
        return segment

    def _open(self) -> SharedSegment:
        address = self._meeting.read("segment", 0)
        if address is None:
            raise BackendError(
                "rank 0 could not create the shared memory", hint="look at that rank's error", backend="shm"
            )
        try:
            found = SegmentAddress(**address)
        except TypeError as error:
            raise BackendError(
                "what the store has in place of the segment's address is none",
                hint="someone else writes to the store of this job: leave out --torch-store",
                backend="shm",
            ) from error
        return SharedSegment.open(found)
