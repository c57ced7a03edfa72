"""Creates a shm group: the ranks meet, share a segment and attach a core to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shm.core import Core, load_native
from torsh_distributed.comm.backends.shm.meeting import ShmMeeting, ShmMember
from torsh_distributed.comm.backends.shm.portable import PortableCore
from torsh_distributed.comm.backends.shm.portable_layout import PortableLayout
from torsh_distributed.comm.backends.shm.segment import SegmentAddress, SharedSegment
from torsh_distributed.comm.backends.shm.wire import ShmWire
from torsh_distributed.errors import FeatureNotAvailable

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
