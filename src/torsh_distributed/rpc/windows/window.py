"""One-sided memory: a worker allocates a window, others put to it and get from it while that worker does anything else.

On one node a window is shared memory, and an operation is a copy or an atomic instruction of the calling process: the
owner does not take part, and may be stopped. Operations between nodes are not offered.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.comm.backends.shm.segment import PREAMBLE_BYTES, SegmentAddress, SharedSegment
from torsh_distributed.comm.meeting.network_interface import network_identity
from torsh_distributed.comm.serialization import DTYPES, TAGS
from torsh_distributed.errors import (
    BackendError,
    CommunicationError,
    FeatureNotAvailable,
    InvalidArgument,
    OperationTimeout,
)
from torsh_distributed.native import WINDOW_ATOMICS, load
from torsh_distributed.rpc.current_worker import current_worker
from torsh_distributed.rpc.rpc_worker import RpcWorker, To

_LOCK_PLACE = PREAMBLE_BYTES
_DATA_PLACE = PREAMBLE_BYTES + 128
_KINDS = {torch.int32: 0, torch.int64: 1, torch.float32: 2, torch.float64: 3}
"""As the compiled module numbers them."""
_WHOLE_KINDS = (torch.int32, torch.int64)


class Window:
    """A worker's memory as this process reaches it. Any thread. Places are counted in elements, row by row.

    Single numbers of int32, int64, float32 and float64 are changed atomically. A put or get of more is not one
    operation: others may see a part of it, unless all of them take the lock.
    """

    provider = "shared memory"
    """What carries the bytes."""
    kernel_bypass = True
    """Whether bytes travel without calls of the kernel."""

    def __init__(self, segment: SharedSegment, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._segment = segment
        self._native = _atomics()
        self._numel = self.shape.numel()
        self._itemsize = dtype.itemsize
        whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._bytes = whole[_DATA_PLACE : _DATA_PLACE + self._numel * self._itemsize]
        self._first = whole.data_ptr() + _DATA_PLACE
        self._lock = whole.data_ptr() + _LOCK_PLACE
        self._kind = _KINDS.get(dtype, -1)
        self._fetch_add = self._native.fetch_add

    @property
    def tensor(self) -> Tensor:
        """The memory itself, for its owner: others may write to it at any time."""
        return self._bytes.view(self.dtype).view(self.shape)

    def put(self, values: Tensor, place: int = 0) -> None:
        """Write values from a place on."""
        values = self._checked(values, place)
        self._native.copy(self._first + place * self._itemsize, values.data_ptr(), values.nbytes)

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
        self._native.copy(out.data_ptr(), self._first + place * self._itemsize, out.nbytes)
        return out

    def accumulate(self, values: Tensor, place: int = 0) -> None:
        """Add values from a place on, each atomically."""
        self._need_kind(_KINDS)
        values = self._checked(values, place)
        self._native.accumulate(self._first + place * self._itemsize, values.data_ptr(), values.numel(), self._kind)

    def fetch_and_add(self, place: int, value: float) -> int | float:
        """Add to one number; returns what it was before."""
        if not 0 <= place < self._numel or self._kind < 0:
            self._check_range(place, 1)
            self._need_kind(_KINDS)
        before: int | float = self._fetch_add(self._first + place * self._itemsize, self._kind, value)
        return before

    def compare_and_swap(self, place: int, expected: int, wanted: int) -> int:
        """Set one whole number if it is what is expected; returns what it was before."""
        self._check_range(place, 1)
        self._need_kind(_WHOLE_KINDS)
        before: int = self._native.compare_swap(self._first + place * self._itemsize, self._kind, expected, wanted)
        return before

    def fence(self) -> None:
        """What this thread has put is visible before anything that it puts afterwards."""
        self._native.fence()

    @contextmanager
    def lock(self, *, timeout_s: float = 60.0) -> Iterator[bool]:
        """Hold the window's lock, which excludes others that take it; OperationTimeout if it cannot be had in time.

        Yields whether its last holder was killed while it had the lock, so that what it wrote may be half done.
        """
        problem = self._native.lock_take(self._lock, timeout_s)
        if problem not in (0, errno.EOWNERDEAD):
            if problem == errno.ETIMEDOUT:
                raise OperationTimeout("another process holds the window's lock", operation="lock", timeout_s=timeout_s)
            if problem == errno.EDEADLK:
                raise InvalidArgument("this thread holds the window's lock already")
            raise BackendError(f"the window's lock cannot be taken: {os.strerror(problem)}", backend="shm")
        try:
            yield problem == errno.EOWNERDEAD
        finally:
            self._native.lock_release(self._lock)

    def close(self) -> None:
        """Close the file; the memory goes with the last window and tensor of it."""
        self._segment.close()

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

    def _need_kind(self, kinds: Any) -> None:
        if self.dtype not in kinds:
            raise FeatureNotAvailable(
                f"this operation is not atomic for {self.dtype}",
                hint=f"allocate the window as one of: {', '.join(map(str, kinds))}",
                provider=self.provider,
            )


def window(
    name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, worker: RpcWorker | None = None
) -> Window:
    """Allocate memory of zeros in this worker that others open by its name and the worker's."""
    if dtype not in TAGS or any(size < 0 for size in shape):
        raise InvalidArgument("a window has a shape and an ordinary dtype", shape=tuple(shape), dtype=str(dtype))
    mine = current_worker() if worker is None else worker
    native = _atomics()
    num_bytes = _DATA_PLACE + math.prod(shape) * dtype.itemsize
    segment, address = SharedSegment.create(num_bytes, backed_bytes=num_bytes)
    made = Window(segment, shape, dtype)
    problem = native.lock_make(made._lock)
    if problem:
        raise BackendError(f"the window's lock cannot be made: {os.strerror(problem)}", backend="shm")
    # Everything is in place before others can find it.
    facts = {"address": asdict(address), "shape": list(shape), "dtype": TAGS[dtype], "network": network_identity()}
    mine.directory.note(f"window/{mine.name}/{name}", json.dumps(facts))
    return made


def open_window(owner: To, name: str, *, worker: RpcWorker | None = None) -> Window:
    """The window of another worker on this node, which need not do anything for it. Its memory stays while this one
    has it open, whatever becomes of the owner."""
    mine = current_worker() if worker is None else worker
    owner_name = mine.find(owner).name
    noted = mine.directory.noted(f"window/{owner_name}/{name}")
    if noted is None:
        raise InvalidArgument(f"worker {owner_name!r} has no window of this name", name=name)
    facts = json.loads(noted)
    if facts["network"] != network_identity():
        raise FeatureNotAvailable(
            f"worker {owner_name!r} is on another node, and windows are shared memory of one",
            hint="call it (rpc.call), or put both on one node",
            looked_for="shared memory",
        )
    try:
        segment = SharedSegment.open(SegmentAddress(**facts["address"]))
    except (OSError, BackendError) as error:
        raise CommunicationError(
            f"the window {name!r} of worker {owner_name!r} cannot be opened: {error}",
            hint="its process may have ended, or belong to another user",
            worker=owner_name,
        ) from error
    return Window(segment, facts["shape"], DTYPES[facts["dtype"]])


def _atomics() -> Any:
    native = load(WINDOW_ATOMICS)
    if native is None:
        raise FeatureNotAvailable(
            "one-sided windows need a compiled module that is not here",
            hint="install from a wheel, or with a C compiler and Python's headers",
            looked_for=str(WINDOW_ATOMICS.target),
        )
    return native
