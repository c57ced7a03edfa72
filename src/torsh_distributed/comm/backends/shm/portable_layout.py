"""The layout of a portable core's segment, and how this process reads and writes it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from torsh_distributed.comm.backends.shm import semaphores
from torsh_distributed.comm.backends.shm.segment import PREAMBLE_BYTES, SharedSegment
from torsh_distributed.comm.backends.shm.semaphores import SEMAPHORE_BYTES

_PAGE_BYTES = 4096
_POISON = struct.Struct("<iiii512s")  # is_set, status, origin, subject, text
_SIGNATURE = struct.Struct("<5q")  # operation, dtype, reduction, root, bytes
_LINE_BYTES = 256  # of one rank: two signatures, then is_joined, pid, is_left
_FLAGS = struct.Struct("<iii")
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
NUM_FRAGMENTS = 8
"""Pieces of a pair's ring; a message flows through them."""

Signature = tuple[int, int, int, int, int]


class PortableLayout:
    """The segment of a portable group: flags, semaphores, slots and rings by their addresses."""

    def __init__(self, num_ranks: int, slot_bytes: int, ring_bytes: int) -> None:
        n = num_ranks
        self.num_ranks = n
        self.slot_bytes = slot_bytes
        self.fragment_bytes = ring_bytes // NUM_FRAGMENTS
        self._poison = PREAMBLE_BYTES
        self._lines = _round_up(self._poison + _POISON.size, _LINE_BYTES)
        self._doors = self._lines + n * _LINE_BYTES
        self._bells = self._doors + n * n * SEMAPHORE_BYTES
        self._channels = self._bells + n * SEMAPHORE_BYTES
        self._counts = self._channels + 2 * n * n * SEMAPHORE_BYTES
        self._slots = _round_up(self._counts + 2 * n * n * 8, _PAGE_BYTES)
        self._rings = self._slots + (2 * n + 2) * slot_bytes
        self.size_bytes = self._rings + n * n * ring_bytes
        self.backed_bytes = self._rings

    def prepare(self, segment: SharedSegment) -> None:
        """Make the semaphores; on the rank that created the segment, before the others map it."""
        view = PortableView(self, segment, rank=0)
        for one in range(self.num_ranks):
            semaphores.initialise(view.bell(one), 0)
            for other in range(self.num_ranks):
                semaphores.initialise(view.door(one, other), 0)
                semaphores.initialise(view.items(one, other), 0)
                semaphores.initialise(view.spaces(one, other), NUM_FRAGMENTS)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class PortableView:
    """A mapped segment: addresses for semaphores and data, flags by value."""

    def __init__(self, layout: PortableLayout, segment: SharedSegment, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self._segment = segment
        self._memory = segment.memory
        # Keeps the mapping alive as long as this view.
        self._anchor = ctypes.c_char.from_buffer(segment.memory)
        self._base = ctypes.addressof(self._anchor)

    def door(self, source: int, target: int) -> int:
        """Posted by `source` when it arrives at a meeting, taken by `target`."""
        return self._base + self.layout._doors + (source * self.layout.num_ranks + target) * SEMAPHORE_BYTES

    def bell(self, rank: int) -> int:
        """Posted when there is news for a rank's messages."""
        return self._base + self.layout._bells + rank * SEMAPHORE_BYTES

    def items(self, source: int, target: int) -> int:
        """Counts the filled fragments of a pair's ring."""
        return self._base + self.layout._channels + 2 * (source * self.layout.num_ranks + target) * SEMAPHORE_BYTES

    def spaces(self, source: int, target: int) -> int:
        """Counts the empty fragments of a pair's ring."""
        return self.items(source, target) + SEMAPHORE_BYTES

    def slot(self, rank: int, step: int) -> int:
        """Where a rank writes before meeting number `step`; rank `num_ranks` stands for results."""
        return self._base + self.layout._slots + (2 * rank + step % 2) * self.layout.slot_bytes

    def result_slot(self, step: int) -> int:
        """Where folded parts are collected."""
        return self.slot(self.layout.num_ranks, step)

    def fragment(self, source: int, target: int, number: int) -> int:
        """The address of a fragment of a pair's ring."""
        pair = source * self.layout.num_ranks + target
        index = pair * NUM_FRAGMENTS + number % NUM_FRAGMENTS
        return self._base + self.layout._rings + index * self.layout.fragment_bytes

    def back_ring(self, target: int) -> None:
        """Give memory to the ring from this rank to `target`; raises OSError if there is none."""
        start = self.fragment(self.rank, target, 0) - self._base
        os.posix_fallocate(self._segment.fd, start, NUM_FRAGMENTS * self.layout.fragment_bytes)

    # --- flags ------------------------------------------------------------------------------------------------

    def _flags(self, rank: int) -> int:
        return self.layout._lines + rank * _LINE_BYTES + 2 * _SIGNATURE.size

    def join(self) -> None:
        """Mark this rank as present."""
        _FLAGS.pack_into(self._memory, self._flags(self.rank), 1, os.getpid(), 0)

    def leave(self) -> None:
        """Mark this rank as gone for good."""
        _FLAGS.pack_into(self._memory, self._flags(self.rank), 1, os.getpid(), 1)

    def is_left(self, rank: int) -> bool:
        """Whether a rank closed the group."""
        return bool(_FLAGS.unpack_from(self._memory, self._flags(rank))[2])

    def is_alive(self, rank: int) -> bool:
        """Whether a rank's process still holds its lock; the kernel never reports a process's own locks."""
        is_joined, pid, _ = _FLAGS.unpack_from(self._memory, self._flags(rank))
        if not is_joined or pid == os.getpid():
            return True
        probe = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        return bool(_LOCK.unpack(fcntl.fcntl(self._segment.fd, fcntl.F_GETLK, probe))[0] != fcntl.F_UNLCK)

    def write_signature(self, parity: int, signature: Signature) -> None:
        """Write what this rank was called with."""
        at = self.layout._lines + self.rank * _LINE_BYTES + parity * _SIGNATURE.size
        _SIGNATURE.pack_into(self._memory, at, *signature)

    def signature(self, rank: int, parity: int) -> Signature:
        """What a rank was called with; valid after synchronising with it."""
        at = self.layout._lines + rank * _LINE_BYTES + parity * _SIGNATURE.size
        operation, dtype, reduction, root, num_bytes = _SIGNATURE.unpack_from(self._memory, at)
        return operation, dtype, reduction, root, num_bytes

    def write_counts(self, parity: int, counts: tuple[int, ...]) -> None:
        """Write how many bytes this rank has for each rank."""
        n = self.layout.num_ranks
        struct.pack_into(f"<{n}q", self._memory, self.layout._counts + (parity * n + self.rank) * n * 8, *counts)

    def counts(self, parity: int) -> list[tuple[int, ...]]:
        """How many bytes every rank has for each; valid after synchronising with them."""
        n, start = self.layout.num_ranks, self.layout._counts
        return [struct.unpack_from(f"<{n}q", self._memory, start + (parity * n + rank) * n * 8) for rank in range(n)]

    def poison(self, status: int, subject: int, text: str) -> None:
        """Record the first failure. Two ranks may do it at once; one of the two records stays."""
        if self.failure() is None:
            record = _POISON.pack(1, status, self.rank, subject, text.encode()[:511])
            # The flag goes last; a reader that sees it early reads zeros, and reads the text again later.
            self._memory[self._poison + 4 : self._poison + len(record)] = record[4:]
            self._memory[self._poison] = 1

    @property
    def _poison(self) -> int:
        return self.layout._poison

    def failure(self) -> tuple[int, int, int, str] | None:
        """The first failure: status, origin, subject, text."""
        is_set, status, origin, subject, text = _POISON.unpack_from(self._memory, self._poison)
        return (status, origin, subject, text.rstrip(b"\0").decode(errors="replace")) if is_set else None
