"""One-sided memory: a worker allocates a window, others put to it and get from it while that worker does anything else.

On one node a window is shared memory, and an operation is a copy or an atomic instruction of the calling process: the
owner does not take part, and may be stopped. Between nodes there is MPI (`mpi_window`).
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

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
from torsh_distributed.rpc.windows.one_sided_window import ATOMIC_DTYPES, WHOLE_DTYPES, OneSidedWindow
from torsh_distributed.rpc.windows.rdma_devices import refuse_nixl

_LOCK_PLACE = PREAMBLE_BYTES
_DATA_PLACE = PREAMBLE_BYTES + 128
_KINDS = {dtype: number for number, dtype in enumerate(ATOMIC_DTYPES)}
"""As the compiled module numbers them."""


class Window(OneSidedWindow):
    """A worker's memory as another process of its node reaches it. Any thread."""

    provider = "shared memory"
    kernel_bypass = True

    def __init__(self, segment: SharedSegment, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._segment = segment
        self._native = _atomics()
        self._itemsize = dtype.itemsize
        whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._bytes = whole[_DATA_PLACE : _DATA_PLACE + self._numel * self._itemsize]
        self._first = whole.data_ptr() + _DATA_PLACE
        self._lock = whole.data_ptr() + _LOCK_PLACE
        self._kind = _KINDS.get(dtype, -1)
        self._fetch_add = self._native.fetch_add

    @property
    @override
    def tensor(self) -> Tensor:
        return self._bytes.view(self.dtype).view(self.shape)

    @override
    def put(self, values: Tensor, place: int = 0) -> None:
        values = self._checked(values, place)
        self._native.copy(self._first + place * self._itemsize, values.data_ptr(), values.nbytes)

    @override
    def _read(self, place: int, out: Tensor) -> None:
        self._native.copy(out.data_ptr(), self._first + place * self._itemsize, out.nbytes)

    @override
    def accumulate(self, values: Tensor, place: int = 0) -> None:
        self._need_dtype(ATOMIC_DTYPES)
        values = self._checked(values, place)
        self._native.accumulate(self._first + place * self._itemsize, values.data_ptr(), values.numel(), self._kind)

    @override
    def fetch_and_add(self, place: int, value: float) -> int | float:
        if not 0 <= place < self._numel or self._kind < 0:
            self._check_range(place, 1)
            self._need_dtype(ATOMIC_DTYPES)
        before: int | float = self._fetch_add(self._first + place * self._itemsize, self._kind, value)
        return before

    @override
    def compare_and_swap(self, place: int, expected: int, wanted: int) -> int:
        self._check_range(place, 1)
        self._need_dtype(WHOLE_DTYPES)
        before: int = self._native.compare_swap(self._first + place * self._itemsize, self._kind, expected, wanted)
        return before

    @override
    def fence(self) -> None:
        self._native.fence()

    @contextmanager
    @override
    def lock(self, *, timeout_s: float = 60.0) -> Iterator[bool]:
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

    @override
    def close(self) -> None:
        """Close the file; the memory goes with the last window and tensor of it."""
        self._segment.close()


def window(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    worker: RpcWorker | None = None,
    provider: Literal["shared memory", "nixl"] = "shared memory",
) -> Window:
    """Allocate memory of zeros in this worker that others of the node open by its name and the worker's.

    Between nodes: `mpi_windows`. FeatureNotAvailable for a provider that is not offered, with what was looked for.
    """
    if provider == "nixl":
        raise refuse_nixl()
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
            hint="call it (rpc.call), put both on one node, or use rpc.mpi_windows",
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
