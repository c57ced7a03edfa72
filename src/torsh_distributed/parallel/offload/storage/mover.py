"""Copies that overlap with computation: on a thread on the host, on separate streams on a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.errors import OperationTimeout

T = TypeVar("T")

_DEADLINE_S = 600.0
"""A copy from host memory or disk that takes longer raises OperationTimeout."""


class PendingCopy(ABC):
    """A copy that has been started."""

    @abstractmethod
    def wait(self) -> None:
        """Order what is computed from now on after the copy; raises what the copy raised."""

    @abstractmethod
    def finish(self) -> None:
        """Block until the copy is done."""


class Mover(ABC):
    """Starts copies between storage and the device, and owns the memory they fill."""

    def __init__(self) -> None:
        self.worker = SerialThread("torsh-offload")

    @abstractmethod
    def start(self, job: Callable[[], None], *, is_plain: bool) -> PendingCopy:
        """Run `job`, which copies to the device; `is_plain`: it only copies, without decoding."""

    @abstractmethod
    def start_out(self, job: Callable[[], None]) -> PendingCopy:
        """Run `job`, which copies from the device what is computed so far."""

    @abstractmethod
    def fill(self, flat: Tensor, num_bytes: int) -> None:
        """Allocate the storage of `flat`."""

    @abstractmethod
    def empty(self, flat: Tensor) -> None:
        """Free the storage of `flat`; computation that still reads it may finish."""

    @property
    @abstractmethod
    def stall_s(self) -> float:
        """Seconds that computation has waited for copies."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for all copies; raises what they raised."""

    def close(self) -> None:
        """End the thread."""
        self.worker.close(_DEADLINE_S)


def finish_future(future: Future[T]) -> T:
    """The result of a worker's job, within the deadline."""
    try:
        return future.result(timeout=_DEADLINE_S)
    except TimeoutError as error:
        raise OperationTimeout(
            f"a copy of offloaded state did not finish within {_DEADLINE_S:g} s",
            hint="look at the disk under offload.disk_dir: it may be hanging",
            operation="offload",
        ) from error


class HostMover(Mover):
    """For the host as the device: copies run on one background thread."""

    def __init__(self) -> None:
        super().__init__()
        self._stall_s = 0.0
        self._jobs: deque[Future[None]] = deque()

    @override
    def start(self, job: Callable[[], None], *, is_plain: bool) -> PendingCopy:
        while self._jobs and self._jobs[0].done():
            finish_future(self._jobs.popleft())
        self._jobs.append(self.worker.submit(job))
        return _HostCopy(self, self._jobs[-1])

    @override
    def start_out(self, job: Callable[[], None]) -> PendingCopy:
        job()
        return _FinishedCopy()

    @override
    def fill(self, flat: Tensor, num_bytes: int) -> None:
        flat.untyped_storage().resize_(num_bytes)

    @override
    def empty(self, flat: Tensor) -> None:
        flat.untyped_storage().resize_(0)

    @property
    @override
    def stall_s(self) -> float:
        return self._stall_s

    @override
    def settle(self) -> None:
        while self._jobs:
            finish_future(self._jobs.popleft())

    def wait(self, future: Future[None]) -> None:
        """Wait for a job; counts the time if it is not done yet."""
        if future.done():
            finish_future(future)
            return
        started = time.monotonic()
        finish_future(future)
        self._stall_s += time.monotonic() - started


class _HostCopy(PendingCopy):
    def __init__(self, mover: HostMover, future: Future[None]) -> None:
        self._mover, self._future = mover, future

    @override
    def wait(self) -> None:
        self._mover.wait(self._future)

    @override
    def finish(self) -> None:
        finish_future(self._future)


class _FinishedCopy(PendingCopy):
    @override
    def wait(self) -> None:
        return

    @override
    def finish(self) -> None:
        return


class CudaMover(Mover):
    """For a GPU: one stream for each direction; the GPU waits, not Python.

    Memory of units belongs to the inward stream. Before freeing it, that stream waits for the computation so far, so
    the next copy into the same memory cannot overtake a kernel that still reads it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stall_s = 0.0

    @override
    def start(self, job: Callable[[], None], *, is_plain: bool) -> PendingCopy:
        if is_plain:
            return _CudaCopy(self, self._copy_in(job), None)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        return _CudaCopy(self, done, self.worker.submit(self._decode_in, job, done))

    @override
    def start_out(self, job: Callable[[], None]) -> PendingCopy:
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            job()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            done.record(self._outward)
        return _CudaCopy(self, done, None)

    @override
    def fill(self, flat: Tensor, num_bytes: int) -> None:
        with torch.cuda.stream(self.inward):
            flat.untyped_storage().resize_(num_bytes)

    @override
    def empty(self, flat: Tensor) -> None:
        self.inward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.inward):
            flat.untyped_storage().resize_(0)

    @property
    @override
    def stall_s(self) -> float:
        """Seconds between the GPU's need for a unit and its arrival."""
        pending = []
        for wanted, had in self._waits:
            if had.query():  # type: ignore[no-untyped-call]  # untyped in torch
                self._stall_s += wanted.elapsed_time(had) / 1e3
            else:
                pending.append((wanted, had))
        self._waits = pending
        return self._stall_s

    @override
    def settle(self) -> None:
        finish_future(self.worker.submit(lambda: None))
        self.inward.synchronize()
        self._outward.synchronize()

    def wait(self, done: torch.cuda.Event) -> None:
        """Make the computation wait for `done`, with a timing event on both sides of the wait."""
        stream = torch.cuda.current_stream(self._device)
        if done.query():  # type: ignore[no-untyped-call]  # untyped in torch
            stream.wait_event(done)
            return
        if len(self._waits) > 1000:
            _ = self.stall_s  # adds up finished waits, so the list stays short
        wanted = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        had = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        wanted.record(stream)
        stream.wait_event(done)
        had.record(stream)
        self._waits.append((wanted, had))

    def _copy_in(self, job: Callable[[], None]) -> torch.cuda.Event:
        with torch.cuda.stream(self.inward):
            job()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            done.record(self.inward)
        return done

    def _decode_in(self, job: Callable[[], None], done: torch.cuda.Event) -> None:
        with torch.cuda.stream(self.inward):
            job()
            done.record(self.inward)


class _CudaCopy(PendingCopy):
    def __init__(self, mover: CudaMover, done: torch.cuda.Event, future: Future[None] | None) -> None:
        self._mover, self._done, self._future = mover, done, future

    @override
    def wait(self) -> None:
        if self._future is not None:
            finish_future(self._future)
        self._mover.wait(self._done)

    @override
    def finish(self) -> None:
        if self._future is not None:
            finish_future(self._future)
        self._done.synchronize()


def mover_for(device: torch.device) -> Mover:
    """What copies to and from `device`."""
    return CudaMover(device) if device.type == "cuda" else HostMover()
