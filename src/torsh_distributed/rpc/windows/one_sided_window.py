"""What every window can do, whatever carries the bytes; places are counted in elements, row by row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument

ATOMIC_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
WHOLE_DTYPES = (torch.int32, torch.int64)


class OneSidedWindow(ABC):
    """A process's memory as this one reaches it.

    Single numbers of int32, int64, float32 and float64 are changed atomically. A put or get of more is not one
    operation: others may see a part of it, unless all of them take the lock.
    """

    provider: str
    """What carries the bytes."""
    kernel_bypass: bool | None
    """Whether bytes travel without calls of the kernel; None where the provider does not tell."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._numel = self.shape.numel()

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """The memory itself, for its owner: others may write to it at any time."""

    @abstractmethod
    def put(self, values: Tensor, place: int = 0) -> None:
        """Write values from a place on."""

    def get(self, place: int = 0, numel: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """A copy of `numel` values from a place on, flat; of the whole window, in its shape, if neither is given.

        `out`, a contiguous tensor of this dtype, takes them instead of new memory, and says how many.
        """
        if out is None:
            is_whole = numel is None and place == 0
            count = self._numel - place if numel is None else numel
            out = torch.empty(self.shape if is_whole else max(0, count), dtype=self.dtype)
        elif numel is not None and numel != out.numel():
            raise InvalidArgument("out has another number of elements", numel=numel, out=out.numel())
        self._check_range(place, out.numel() if numel is None else numel)
        if out.dtype != self.dtype or not out.is_contiguous() or not out.is_cpu:
            raise InvalidArgument("out is a contiguous tensor of the window's dtype on the CPU", dtype=str(out.dtype))
        self._read(place, out)
        return out

    @abstractmethod
    def _read(self, place: int, out: Tensor) -> None:
        """Fill `out`, which was checked."""

    @abstractmethod
    def accumulate(self, values: Tensor, place: int = 0) -> None:
        """Add values from a place on, each atomically."""

    @abstractmethod
    def fetch_and_add(self, place: int, value: float) -> int | float:
        """Add to one number; returns what it was before."""

    @abstractmethod
    def compare_and_swap(self, place: int, expected: int, wanted: int) -> int:
        """Set one whole number if it is what is expected; returns what it was before."""

    @abstractmethod
    def fence(self) -> None:
        """What this thread has put is visible before anything that it puts afterwards."""

    @abstractmethod
    def lock(self, *, timeout_s: float = 60.0) -> AbstractContextManager[bool]:
        """Hold the window's lock, which excludes others that take it; OperationTimeout if it cannot be had in time.

        Yields whether its last holder was killed while it had the lock, so that what it wrote may be half done.
        """

    @abstractmethod
    def close(self) -> None:
        """Use it no longer."""

    def _checked(self, values: Tensor, place: int) -> Tensor:
        if values.dtype != self.dtype:
            raise InvalidArgument("the values have another dtype", window=str(self.dtype), values=str(values.dtype))
        self._check_range(place, values.numel())
        return values.detach().cpu().contiguous()

    def _check_range(self, place: int, numel: int) -> None:
        if place < 0 or numel < 0 or place + numel > self._numel:
            raise InvalidArgument(
                f"access outside the window: elements {place} to {place + numel} of {self._numel}",
                shape=tuple(self.shape),
            )

    def _need_dtype(self, dtypes: Collection[torch.dtype]) -> None:
        if self.dtype not in dtypes:
            raise FeatureNotAvailable(
                f"this operation is not atomic for {self.dtype}",
                hint=f"allocate the window as one of: {', '.join(map(str, dtypes))}",
                provider=self.provider,
            )
