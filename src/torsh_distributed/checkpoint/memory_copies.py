"""Copies in memory on several threads, where a launcher gave each rank one and the machine has cores to spare.

One thread copies 4 to 8 GB/s, a memory bus several times that. Launchers set OMP_NUM_THREADS to 1, rightly: training
uses the cores. But training waits while its state is copied or loaded, so for that time a rank may take its share.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from torsh_distributed import known_variables

_MOST_THREADS = 4
"""A rank's copy takes 102, 56, 33 and 25 ms on 1, 2, 4 and 7 threads of 16 cores; beyond 4 the bus is shared out."""
_LEAST_BYTES = 1 << 20
"""Smaller ones are copied at once: handing them over takes longer."""


class MemoryCopies:
    """Copies on threads that end with this object. As a context: all have arrived when it is left, or it raises."""

    def __init__(self) -> None:
        self._num_threads = count = threads_to_copy()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="torsh-copy") if count > 1 else None
        self._pending: list[Future[Any]] = []
        self._devices: set[torch.device] = set()

    def __enter__(self) -> Self:
        return self

    def add(self, target: Tensor, source: Tensor) -> None:
        """Start a copy."""
        are_on_host = target.device.type == source.device.type == "cpu"
        if self._threads is not None and are_on_host and target.nbytes >= _LEAST_BYTES:
            self._pending.append(self._threads.submit(target.copy_, source))
            return
        target.copy_(source, non_blocking=True)
        if source.device.type == "cuda":
            self._devices.add(source.device)

    def copy_bytes(self, target: memoryview, source: memoryview) -> None:
        """Copy one piece of memory, on all threads, and wait for it."""
        into, data = np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8)
        if self._threads is None or len(data) < _LEAST_BYTES:
            np.copyto(into, data)
            return
        step = -(-len(data) // self._num_threads)
        for start in range(0, len(data), step):
            part = slice(start, start + step)
            self._pending.append(self._threads.submit(np.copyto, into[part], data[part]))
        self.wait_for_threads()

    def wait_for_threads(self) -> None:
        """Wait for what the threads copy, and let go of it: from here on its source may change."""
        pending, self._pending = self._pending, []
        for copy in pending:
            copy.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait_for_threads()
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            for device in self._devices:
                torch.cuda.current_stream(device).synchronize()


def threads_to_copy() -> int:
    """This rank's share of the cores, up to four; 1 where torch's operators have several threads themselves."""
    if torch.get_num_threads() > 1:
        return 1
    ranks_here = max(1, known_variables.whole_number("LOCAL_WORLD_SIZE"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_here))
