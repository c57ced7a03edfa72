"""The memory that the ranks of a group share: created by one, mapped by all, without a file name.

Rank 0 creates an anonymous file in memory; the others open it through rank 0's /proc entry. They believe no path:
the address is two numbers, signed with the job's secret where there is one, and what is opened must be a memory file
of this user, sealed so nobody can change its size (a smaller file kills whoever touches the missing pages), with a
random token.
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
import stat
from dataclasses import dataclass, replace
from typing import Self

from torsh_distributed.comm.trust.job_secret import is_signed, job_secret, sign
from torsh_distributed.errors import BackendError, MemoryAllocationFailed

_MAGIC = b"TORSHSHM"
_TOKEN_BYTES = 32
PREAMBLE_BYTES = 128
_PAGE_BYTES = 4096
_NAME = "torsh-shm"
_PURPOSE = "shm segment"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, kw_only=True)
class SegmentAddress:
    """Where the other ranks find a segment, and how they know it is the right one."""

    pid: int
    fd: int
    token: str
    size_bytes: int
    signature: str | None = None
    """Of the rest, with the job's secret; None where the job has none."""

    @property
    def path(self) -> str:
        """Where the kernel shows the other rank's file."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def signed(self) -> SegmentAddress:
        """This address with its signature."""
        secret = job_secret()
        return self if secret is None else replace(self, signature=sign(secret, _PURPOSE, self._message()))

    def check(self) -> None:
        """Raise BackendError unless a member of this job wrote the address."""
        numbers = (self.pid, self.fd, self.size_bytes)
        if not all(type(number) is int and number >= 0 for number in numbers) or type(self.token) is not str:
            raise _foreign(self, "its address is malformed")
        secret = job_secret()
        if secret is not None and not is_signed(secret, _PURPOSE, self._message(), self.signature):
            raise _foreign(self, "its address is not signed with the job's secret")

    def _message(self) -> bytes:
        return f"{self.pid} {self.fd} {self.size_bytes} {self.token}".encode()


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
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, backed_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
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
        return segment, SegmentAddress(pid=os.getpid(), fd=fd, token=token, size_bytes=size_bytes).signed()

    @classmethod
    def open(cls, address: SegmentAddress) -> Self:
        """Map the segment that another rank created; raises BackendError for anything else."""
        address.check()
        fd = open_memory_file(address.path, size_bytes=address.size_bytes, seals=_SEALS)
        segment = cls(fd, address.size_bytes)
        mark = segment.memory[: len(_MAGIC) + _TOKEN_BYTES]
        if mark != _MAGIC + address.token.encode():
            segment.close()
            raise _foreign(address, "it has another token")
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


def open_memory_file(path: str, *, size_bytes: int, seals: int = 0) -> int:
    """A descriptor of another process's unnamed memory file; BackendError unless it is one of this user, of that size.

    Looked at before it is opened: opening a device or a pipe has effects of its own.
    """
    try:
        before = os.stat(path)  # noqa: PTH116 - a Path would resolve the link
    except OSError as error:
        raise _unopened(path, error) from error
    _check_status(path, before, size_bytes)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _unopened(path, error) from error
    try:
        _check_status(path, os.fstat(fd), size_bytes)
        if seals and _seals_of(fd) & seals != seals:
            raise _not_memory(path, "its size is not sealed")
    except BackendError:
        os.close(fd)
        raise
    return fd


def _seals_of(fd: int) -> int:
    """The file's seals; a file that cannot have any has none."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def _unopened(path: str, error: OSError) -> BackendError:
    return BackendError(
        f"another rank's shared memory cannot be opened: {error.strerror}",
        hint="all ranks of a node must run as the same user and see each other in /proc",
        backend="shm",
        path=path,
    )


def _check_status(path: str, status: os.stat_result, size_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_memory(path, "it is not a regular file")
    if status.st_uid != os.geteuid():
        raise _not_memory(path, f"it belongs to user {status.st_uid}")
    if status.st_nlink != 0:
        raise _not_memory(path, "it is a file with a name")
    if status.st_size != size_bytes:
        raise _not_memory(path, f"it has {status.st_size} bytes, not {size_bytes}")


def _not_memory(path: str, reason: str) -> BackendError:
    return BackendError(
        f"what another rank offers as shared memory is refused: {reason}",
        hint="a process outside the job may have written to its store; run the job under `torsh run`",
        backend="shm",
        path=path,
    )


def _foreign(address: SegmentAddress, reason: str) -> BackendError:
    return BackendError(
        f"the shared memory found is not that of this group: {reason}",
        hint="rank 0 may have died and its process number been reused; start again",
        backend="shm",
        path=address.path,
    )
