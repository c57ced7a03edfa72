"""Copies between tensors on several threads, where a launcher gave each rank one and the machine has cores to spare.

One thread copies 4 to 8 GB/s, a memory bus several times that. Launchers set OMP_NUM_THREADS to 1, rightly: training
uses the cores. But training waits while its state is copied, so for that moment a rank may take its share of them.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

_MOST_THREADS = 4
"""A rank's copy takes 102, 56, 33 and 25 ms on 1, 2, 4 and 7 threads of 16 cores; beyond 4 the bus is shared out."""
_LEAST_BYTES = 1 << 20
"""Smaller ones are copied at once: handing them over takes longer."""


class MemoryCopies:
    """A context whose copies have all arrived when it is left; it raises if one of them failed."""

    def __init__(self) -> None:
        num_threads = threads_to_copy()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="torsh-copy") if num_threads > 1 else None
        self._pending: list[Future[Tensor]] = []
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
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_here))
