"""What this process uses: memory, cores, and the memory of its device."""

from __future__ import annotations

import os
import resource
import sys
import time

from torsh_distributed.observe.metrics.rank_metrics import RankMetrics

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessSensors:
    """Reads the process; each reading takes some ten microseconds and touches no device that is not in use."""

    def __init__(self) -> None:
        self._cpu_s, self._at_s = time.process_time(), time.monotonic()

    def read(self, metrics: RankMetrics) -> None:
        """Record what is used now."""
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - read every second; pathlib is slower
            metrics("torsh_host_memory_bytes").record(int(file.read().split()[1]) * _PAGE_BYTES)
        metrics("torsh_host_memory_peak_bytes").record(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        cpu_s, at_s = time.process_time(), time.monotonic()
        if at_s > self._at_s:
            metrics("torsh_process_cpu_cores").record((cpu_s - self._cpu_s) / (at_s - self._at_s))
        self._cpu_s, self._at_s = cpu_s, at_s
        self._read_device(metrics)

    def _read_device(self, metrics: RankMetrics) -> None:
        cuda = sys.modules.get("torch.cuda")
        # Only if the program uses it: asking would open the device and take half a gigabyte of it.
        if cuda is None or not getattr(cuda, "is_initialized", bool)():
            return
        metrics("torsh_device_memory_bytes").record(cuda.memory_allocated())
        metrics("torsh_device_memory_peak_bytes").record(cuda.max_memory_allocated())
        metrics("torsh_device_memory_reserved_bytes").record(cuda.memory_reserved())
