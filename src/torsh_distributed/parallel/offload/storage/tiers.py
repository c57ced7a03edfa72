"""Host memory and disk, each with a budget that no allocation exceeds."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.errors import IoError, MemoryAllocationFailed

_PAGE = mmap.ALLOCATIONGRANULARITY
_LARGE_PAGE = 2**21
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class MemoryBudget:
    """Counts the bytes of one kind of memory against its budget."""

    def __init__(self, name: str, budget_bytes: int, *, setting: str, section: str = "offload") -> None:
        self.name = name
        self.limit_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._setting = f"{section}.{setting}"
        state = ", choose a smaller offload.cpu_compression, or add a disk with offload.disk_dir"
        self._way_out = state if section == "offload" else ""

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be charged."""
        return self.limit_bytes - self.used_bytes

    @property
    def pressure(self) -> float:
        """The share of the budget in use."""
        return self.used_bytes / self.limit_bytes

    def charge(self, num_bytes: int, what: str) -> None:
        """Count `num_bytes` for `what`, or raise MemoryAllocationFailed without counting them."""
        if num_bytes > self.free_bytes:
            raise MemoryAllocationFailed(
                f"{what} needs {num_bytes} bytes of {self.name}, but {self.free_bytes} of {self.limit_bytes} are left",
                hint=f"raise {self._setting} by at least {num_bytes - self.free_bytes} bytes{self._way_out}",
                needed_bytes=num_bytes,
                free_bytes=self.free_bytes,
                budget_bytes=self.limit_bytes,
            )
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def refund(self, num_bytes: int) -> None:
        """Undo a charge."""
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, "more bytes refunded than charged"


@dataclass
class Allocation:
    """Bytes allocated in a tier; `tensor` is 1-D uint8 and may be read and written in place."""

    tier: StorageTier
    tensor: Tensor
    charged_bytes: int
    offset: int = -1
    is_pinned: bool = False
    mapping: mmap.mmap | None = field(default=None, repr=False)

    def prefetch(self) -> None:
        """Ask the kernel to read the bytes from disk soon; does not wait."""
        if self.mapping is not None:
            self.mapping.madvise(mmap.MADV_WILLNEED)

    def drop_pages(self) -> None:
        """Unmap the pages from this process's memory; the kernel writes changes back to the file."""
        if self.mapping is not None:
            self.mapping.madvise(mmap.MADV_DONTNEED)


class StorageTier(ABC):
    """One kind of memory, with its budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget

    @abstractmethod
    def allocate(self, num_bytes: int, what: str, *, is_copied: bool = False) -> Allocation:
        """Zeroed bytes for `what`, or MemoryAllocationFailed before anything is allocated.

        `is_copied`: a GPU will copy from or to them.
        """

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Free an allocation; its tensor must not be used afterwards."""

    def close(self) -> None:  # noqa: B027 (only the disk holds a file open)
        """Release what the tier itself holds."""


class HostTier(StorageTier):
    """Host memory, pinned where a GPU copies from it so copies overlap with computation."""

    def __init__(self, budget_bytes: int, *, is_pinned: bool) -> None:
        super().__init__(MemoryBudget("host memory", budget_bytes, setting="cpu_memory_budget_gb"))
        self._is_pinned = is_pinned

    @override
    def allocate(self, num_bytes: int, what: str, *, is_copied: bool = False) -> Allocation:
        self.budget.charge(num_bytes, what)
        tensor = _host_bytes(num_bytes)
        is_pinned = self._is_pinned and is_copied and num_bytes > 0
        if is_pinned:
            # Not torch's pinned allocator: it rounds up to a power of two, which would break the budget.
            status = _cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
            if int(status) != 0:
                self.budget.refund(num_bytes)
                raise MemoryAllocationFailed(
                    f"{num_bytes} bytes of host memory could not be pinned for {what}",
                    hint="raise `ulimit -l`, or set offload.pin_cpu_memory = false",
                    cuda_error=int(status),
                )
        return Allocation(self, tensor, num_bytes, is_pinned=is_pinned)

    @override
    def free(self, allocation: Allocation) -> None:
        if allocation.is_pinned:
            _cudart().cudaHostUnregister(allocation.tensor.data_ptr())
        self.budget.refund(allocation.charged_bytes)
        allocation.tensor = torch.empty(0, dtype=torch.uint8)


class DiskTier(StorageTier):
    """An unnamed file, mapped into memory: the kernel removes it when the process ends, however it ends.

    Disk space is reserved before it is mapped: a full disk is an error here, not a signal (SIGBUS) in the middle of a
    step.
    """

    def __init__(self, directory: str | Path, budget_bytes: int, *, section: str = "offload") -> None:
        super().__init__(MemoryBudget("disk space", budget_bytes, setting="disk_budget_gb", section=section))
        self._section = section
        self._directory = Path(directory)
        self._fd = _open_nameless(self._directory)
        self._end = 0
        self._holes: list[tuple[int, int]] = []
        """Free ranges of the file as (offset, size), sorted by offset; adjacent ones are merged."""

    @property
    def file_bytes(self) -> int:
        """Disk space of the file now, as the file system counts it."""
        return os.fstat(self._fd).st_blocks * 512

    def has_room(self, num_bytes: int) -> bool:
        """Whether the budget has room for that many bytes; the disk itself may still be full."""
        return self._round(num_bytes) <= self.budget.free_bytes

    @override
    def allocate(self, num_bytes: int, what: str, *, is_copied: bool = False) -> Allocation:
        size = self._round(num_bytes)
        self.budget.charge(size, what)
        try:
            offset = self._find_room(size, what)
            mapping = mmap.mmap(self._fd, size, offset=offset)
        except BaseException:
            self.budget.refund(size)
            raise
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
        return Allocation(self, tensor, size, offset, mapping=mapping)

    @override
    def free(self, allocation: Allocation) -> None:
        allocation.tensor, allocation.mapping = torch.empty(0, dtype=torch.uint8), None
        self.budget.refund(allocation.charged_bytes)
        merged: list[tuple[int, int]] = []
        for offset, size in sorted([*self._holes, (allocation.offset, allocation.charged_bytes)]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._holes = merged

    @override
    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _round(self, num_bytes: int) -> int:
        return max(1, -(-num_bytes // _PAGE)) * _PAGE

    def _find_room(self, size: int, what: str) -> int:
        for index, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        try:
            os.posix_fallocate(self._fd, self._end, size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise IoError(
                f"the disk under {self._directory} has no room for {what}: {size} more bytes after {self._end}",
                hint=f"free some space, or point {self._section}.disk_dir at a larger disk",
                errno=error.errno,
                disk_dir=str(self._directory),
                needed_bytes=size,
                written_bytes=self._end,
            ) from error
        self._end += size
        return self._end - size


def _host_bytes(num_bytes: int) -> Tensor:
    """Zeroed memory, in huge pages if it is large: every update reads and writes all of it."""
    if num_bytes < _LARGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _cudart() -> Any:
    """The CUDA runtime, untyped in torch."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch


def _open_nameless(directory: Path) -> int:
    """Open a file without a name, so no kind of exit leaves it behind."""
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        fd, name = tempfile.mkstemp(dir=directory)
        Path(name).unlink()
        return fd
    except OSError as error:
        raise IoError(
            f"cannot create a file in {directory}: {error.strerror}",
            hint="create the directory on every node, writable by this user",
            errno=error.errno,
            disk_dir=str(directory),
        ) from error
