"""What the node measures about itself: processor, memory, network, disks, temperatures, energy, GPUs.

Read by the first rank of each node. What is absent is absent: most of it needs psutil, and a kernel with that sensor.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import resource
import sys
import time
from pathlib import Path

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.observe.metrics.energy_counters import POWERCAP, rapl_counters
from torsh_distributed.observe.metrics.gpu_sensors import GpuSensors
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
        # One reading: each function for a single number takes all of them and drops the others.
        found = cuda.memory_stats()
        reserved = found.get("reserved_bytes.all.current", 0)
        metrics("torsh_device_memory_bytes").record(found.get("allocated_bytes.all.current", 0))
        metrics("torsh_device_memory_peak_bytes").record(found.get("allocated_bytes.all.peak", 0))
        metrics("torsh_device_memory_reserved_bytes").record(reserved)
        if reserved:
            unusable = found.get("inactive_split_bytes.all.current", 0)
            metrics("torsh_device_memory_fragmentation_ratio").record(unusable / reserved)


_log = logging.getLogger(__name__)
_MAX_SENSORS = 16


class MachineSensors:
    """Reads the node at most every `interval_s`. A sensor that fails is not read again."""

    def __init__(self, interval_s: float = 5.0, *, powercap: Path = POWERCAP) -> None:
        self._interval_s = interval_s
        self._due_s = 0.0
        self._totals: dict[str, float] = {}
        self._gpus = GpuSensors()
        self._readers = [self._read_processor, self._read_memory, self._read_traffic, self._read_temperatures]
        if importlib.util.find_spec("psutil") is None:
            _log.info("no psutil: the node's processor, memory, network and disks are not measured")
            self._readers = []
        self._powercap = powercap
        self._readers += [self._read_energy, self._read_gpus]

    def read(self, metrics: RankMetrics) -> None:
        """Record what can be read, if it is time."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + self._interval_s
        for reader in list(self._readers):
            try:
                reader(metrics)
            except FeatureNotAvailable as error:
                _log.warning("%s: %s", error.message, error.hint)
                self._readers.remove(reader)
            except Exception as error:  # a driver or a kernel without the file: one sensor less
                _log.info("%s does not work here: %s", reader.__name__.removeprefix("_"), error)
                self._readers.remove(reader)

    def _read_processor(self, metrics: RankMetrics) -> None:
        import psutil

        is_first = "cpu" not in self._totals
        self._totals["cpu"] = busy = psutil.cpu_percent() / 100
        io_wait = getattr(psutil.cpu_times_percent(), "iowait", None)
        if not is_first:  # the first one covers no time
            metrics("torsh_node_cpu_ratio").record(busy)
            if io_wait is not None:
                metrics("torsh_node_io_wait_ratio").record(io_wait / 100)
        metrics("torsh_node_load").record(os.getloadavg()[0])

    def _read_memory(self, metrics: RankMetrics) -> None:
        import psutil

        memory = psutil.virtual_memory()
        metrics("torsh_node_memory_used_bytes").record(memory.total - memory.available)
        metrics("torsh_node_memory_total_bytes").record(memory.total)
        metrics("torsh_node_memory_ratio").record(1 - memory.available / memory.total)

    def _read_traffic(self, metrics: RankMetrics) -> None:
        import psutil

        received = sent = 0
        for name, card in psutil.net_io_counters(pernic=True).items():
            if name != "lo":
                received += card.bytes_recv
                sent += card.bytes_sent
        self._grow(metrics, "torsh_node_network_receive_bytes", received)
        self._grow(metrics, "torsh_node_network_transmit_bytes", sent)
        disks = psutil.disk_io_counters()
        if disks is not None:
            self._grow(metrics, "torsh_node_disk_read_bytes", disks.read_bytes)
            self._grow(metrics, "torsh_node_disk_write_bytes", disks.write_bytes)

    def _read_temperatures(self, metrics: RankMetrics) -> None:
        import psutil

        sensors = [
            (f"{chip} {sensor.label}".strip(), sensor.current)
            for chip, found in psutil.sensors_temperatures().items()
            for sensor in found
        ]
        for name, celsius in sensors[:_MAX_SENSORS]:
            metrics("torsh_node_temperature_celsius", name[:60]).record(celsius)

    def _read_energy(self, metrics: RankMetrics) -> None:
        """What the processors' own meters count (RAPL), since the first reading; often for root alone."""
        for counter in rapl_counters(self._powercap):
            total_j = counter.read_j()
            before_j = self._totals.get(counter.name)
            self._totals[counter.name] = total_j
            if before_j is not None:
                # The counter starts over every few minutes to hours.
                range_j = counter.range_j or 0.0 if total_j < before_j else 0.0
                metrics("torsh_node_energy_joules", counter.name).record(total_j - before_j + range_j)

    def _read_gpus(self, metrics: RankMetrics) -> None:
        for reading in self._gpus.read():
            gpu = str(reading.index)
            for name, value in (
                ("torsh_gpu_utilization_ratio", reading.utilization),
                ("torsh_gpu_memory_used_bytes", reading.used_bytes),
                ("torsh_gpu_memory_total_bytes", reading.total_bytes),
                ("torsh_gpu_memory_ratio", reading.used_share),
                ("torsh_gpu_temperature_celsius", reading.celsius),
                ("torsh_gpu_power_watts", reading.power_w),
            ):
                if value is not None:
                    metrics(name, gpu).record(value)
            if reading.energy_j is not None:
                self._grow(metrics, "torsh_gpu_energy_joules", reading.energy_j, gpu)

    def _grow(self, metrics: RankMetrics, name: str, total: float, *labels: str) -> None:
        """Record a total that the system counts: its growth since the last reading, from zero if it starts over."""
        key = name + "".join(labels)
        before = self._totals.get(key, 0.0)
        self._totals[key] = total
        metrics(name, *labels).record(total - before if total >= before else total)
