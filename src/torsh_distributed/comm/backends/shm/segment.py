"""The memory that the ranks of a group share: created by one, mapped by all, without a file name.

Rank 0 creates an anonymous file in memory; the others open it through rank 0's /proc entry and compare a random token.
Why not a name in /dev/shm: a name outlives a process killed before it could unlink it, two jobs may choose the same
one, and containers limit /dev/shm to a few megabytes. An anonymous file is gone with the last process that has it.

Every rank locks its own byte of the file. The kernel drops the lock when the process ends, however it ends, so the
others can tell a dead rank from a slow one without its pid, which may be reused or belong to another namespace.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Self

from torsh_distributed.errors import BackendError, MemoryAllocationFailed

_MAGIC = b"TORSHSHM"
_TOKEN_BYTES = 32
PREAMBLE_BYTES = 128
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class SegmentAddress:
    """Where the other ranks find a segment, and how they know it is the right one."""

    path: str
    token: str
    size_bytes: int


class SharedSegment:
    """A mapped segment; the mapping lives as long as something points into it, the file until `close`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        try:
            self.memory = mmap.mmap(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise MemoryAllocationFailed(
                f"the shared-memory segment cannot be mapped: {error.strerror}",
                hint="raise the limit on address space (ulimit -v)",
                requested_bytes=size_bytes,
            ) from error

    @classmethod
    def create(cls, size_bytes: int, *, backed_bytes: int) -> tuple[Self, SegmentAddress]:
        """Create a segment whose first `backed_bytes` have memory; the rest gets it when used."""
        fd = os.memfd_create("torsh-shm", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, backed_bytes)
        except OSError as error:
            os.close(fd)
            raise MemoryAllocationFailed(
                f"there is no memory for a shared segment: {error.strerror}",
                hint="raise the memory limit of the container, or put fewer ranks on this node",
                requested_bytes=backed_bytes,
            ) from error
        segment = cls(fd, size_bytes)
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        segment.memory[: len(_MAGIC)] = _MAGIC
        segment.memory[len(_MAGIC) : len(_MAGIC) + _TOKEN_BYTES] = token.encode()
        return segment, SegmentAddress(path=f"/proc/{os.getpid()}/fd/{fd}", token=token, size_bytes=size_bytes)

    @classmethod
    def open(cls, address: SegmentAddress) -> Self:
        """Map the segment that another rank created."""
        try:
            fd = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BackendError(
                f"rank 0's shared memory cannot be opened: {error.strerror}",
                hint="all ranks of a node must run as the same user and see each other in /proc",
                backend="shm",
                path=address.path,
            ) from error
        if os.fstat(fd).st_size != address.size_bytes:
            os.close(fd)
            raise _foreign(address)
        segment = cls(fd, address.size_bytes)
        mark = segment.memory[: len(_MAGIC) + _TOKEN_BYTES]
        if mark != _MAGIC + address.token.encode():
            segment.close()
            raise _foreign(address)
        return segment

    def lock(self, rank: int) -> None:
        """Hold this rank's byte for as long as the process lives."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError as error:
            raise BackendError(
                f"rank {rank}'s place in the segment is taken: {error.strerror}",
                hint="two processes have the same rank",
                backend="shm",
                rank=rank,
            ) from error

    def touch(self, num_bytes: int) -> None:
        """Fault in the first pages now instead of in the first collective."""
        with memoryview(self.memory) as view:
            bytes(view[:num_bytes:_PAGE_BYTES])

    def close(self) -> None:
        """Close the file; the mapping itself goes with the last tensor or core in it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _foreign(address: SegmentAddress) -> BackendError:
    return BackendError(
        "the shared memory found is not that of this group",
        hint="rank 0 may have died and its process number been reused; start again",
        backend="shm",
        path=address.path,
    )
