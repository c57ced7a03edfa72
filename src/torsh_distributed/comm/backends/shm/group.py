"""Creates a shm group: the ranks meet, share a segment and attach a core to it.

How the ranks of a shm group meet in the store: who is where, who has which core, and where the segment is.
All ranks read the same records, so all reach the same conclusion: if one rank cannot take part, the others raise an
error instead of waiting for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shm.core import Core, load_native
from torsh_distributed.comm.backends.shm.portable import PortableCore
from torsh_distributed.comm.backends.shm.portable_layout import PortableLayout
from torsh_distributed.comm.backends.shm.segment import SegmentAddress, SharedSegment
from torsh_distributed.comm.backends.shm.wire import ShmWire
from torsh_distributed.comm.meeting.node_identity import node_identity
from torsh_distributed.comm.meeting.store_meeting import StoreMeeting, attempt_store
from torsh_distributed.errors import BackendError, FeatureNotAvailable, InvalidArgument, TorshError


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
                "what the store holds is not the address of a shared segment",
                hint="someone else writes to the store of this job: leave out --torch-store",
                backend="shm",
            ) from error
        return SharedSegment.open(found)


# The chunk of a collective. On an idle machine speed is flat between 128 KB and 4 MB. Larger chunks synchronise less
# often, which counts where ranks share cores; smaller ones keep the segments of many ranks small: each rank has two.
_MAX_SLOT_BYTES = 1024 * 1024
_MIN_SLOT_BYTES = 256 * 1024
_ALL_SLOTS_BYTES = 16 * 1024 * 1024
_MAX_RING_BYTES = 256 * 1024
_MIN_RING_BYTES = 16 * 1024
# All rings together: address space, not memory, until a pair exchanges messages.
_ALL_RINGS_BYTES = 256 * 1024 * 1024
# How long a caller with a core of its own spins before it sleeps: waking it costs about as much.
_SPIN_NS = 100_000


@dataclass(frozen=True, kw_only=True)
class ShmOptions:
    """What `init_process_group("shm", pg_options=…)` and `new_group(pg_options=…)` take."""

    core: Literal["auto", "native", "portable"] = "auto"
    """`auto` is the compiled core if every rank has it, else the portable one; `native` raises without it."""

    num_local_ranks: int | None = None
    """How many ranks compete for this node's cores. None: as many as the world has, or the group if it is larger."""


def create_shm_group(options: Any, backend_options: object) -> TorshProcessGroup:
    """c10d's hook for the backend; every rank of the group calls it, through init_process_group or new_group.

    Any: the class of `options` is private to torch.
    """
    chosen = backend_options if isinstance(backend_options, ShmOptions) else ShmOptions()
    wire = create_shm_wire(
        options.store, rank=options.group_rank, num_ranks=options.group_size, timeout=options.timeout, options=chosen
    )
    return TorshProcessGroup(options.store, wire, options.timeout)


def create_shm_wire(
    store: dist.Store, *, rank: int, num_ranks: int, timeout: timedelta, options: ShmOptions
) -> ShmWire:
    """Meet the other ranks in `store` and share memory with them; every rank calls it."""
    meeting = ShmMeeting(store, rank=rank, num_ranks=num_ranks, timeout_s=timeout.total_seconds())
    native = load_native() if options.core != "portable" else None
    members = meeting.exchange(ShmMember.here(native.VERSION if native is not None else 0))
    builder = _choose(native, members, options)
    segment = meeting.share(builder.create)
    segment.touch(builder.backed_bytes)
    core = builder.attach(segment, rank=rank, spin_ns=_spin_ns(members, num_ranks, options))
    core.join()
    return ShmWire(core, segment, rank=rank, num_ranks=num_ranks)


class _NativeBuilder:
    def __init__(self, native: Any, num_ranks: int) -> None:
        self._native = native
        self._num_ranks = num_ranks
        self._slot_bytes = _slot_bytes(num_ranks)
        self._ring_bytes = _ring_bytes(num_ranks)
        self._size_bytes, self.backed_bytes = native.segment_bytes(num_ranks, self._slot_bytes, self._ring_bytes)

    def create(self) -> tuple[SharedSegment, SegmentAddress]:
        return SharedSegment.create(self._size_bytes, backed_bytes=self.backed_bytes)

    def attach(self, segment: SharedSegment, *, rank: int, spin_ns: int) -> Core:
        core: Core = self._native.Group(
            segment.memory, segment.fd, rank, self._num_ranks, self._slot_bytes, self._ring_bytes, spin_ns
        )
        return core


class _PortableBuilder:
    def __init__(self, num_ranks: int) -> None:
        self._layout = PortableLayout(num_ranks, _slot_bytes(num_ranks), _ring_bytes(num_ranks))
        self.backed_bytes = self._layout.backed_bytes

    def create(self) -> tuple[SharedSegment, SegmentAddress]:
        segment, address = SharedSegment.create(self._layout.size_bytes, backed_bytes=self.backed_bytes)
        self._layout.prepare(segment)
        return segment, address

    def attach(self, segment: SharedSegment, *, rank: int, spin_ns: int) -> Core:
        return PortableCore(self._layout, segment, rank=rank, spin_ns=spin_ns)


def _choose(native: Any, members: list[ShmMember], options: ShmOptions) -> _NativeBuilder | _PortableBuilder:
    """The core that all ranks have. All ranks read the same records, so all choose the same."""
    versions = {member.native_version for member in members}
    if native is not None and versions == {native.VERSION}:
        return _NativeBuilder(native, len(members))
    without = [rank for rank, member in enumerate(members) if not member.native_version]
    if options.core == "native":
        raise FeatureNotAvailable(
            "not every rank has the same compiled core of the shm backend",
            hint="reinstall torsh-distributed with a C compiler and Python's headers, or use core='auto'",
            ranks_without=without,
            versions=sorted(versions),
        )
    if options.core == "auto":
        reason = f"no compiled core on ranks {without}" if without else f"different compiled cores: {sorted(versions)}"
        events.emit(events.DecisionEvent(subject="shm core", choice="portable", reason=reason))
    return _PortableBuilder(len(members))


def _slot_bytes(num_ranks: int) -> int:
    """The bytes of a rank's slot for its part of a chunk; smaller for many ranks."""
    share = _ALL_SLOTS_BYTES // (2 * num_ranks + 2) // 4096 * 4096
    return max(min(_MAX_SLOT_BYTES, share), _MIN_SLOT_BYTES)


def _ring_bytes(num_ranks: int) -> int:
    """The bytes of a pair's message ring; smaller for many ranks because there is one per pair."""
    share = _ALL_RINGS_BYTES // num_ranks**2 // 4096 * 4096
    return max(min(_MAX_RING_BYTES, share), _MIN_RING_BYTES)


def _spin_ns(members: list[ShmMember], num_ranks: int, options: ShmOptions) -> int:
    """Spin only where every rank has a core of its own: otherwise the rank waited for may need this core."""
    world_size = dist.get_world_size() if dist.is_initialized() else 0
    num_local_ranks = options.num_local_ranks or max(num_ranks, world_size)
    cores = {core for member in members for core in member.cores}
    return _SPIN_NS if len(cores) >= num_local_ranks else 0
