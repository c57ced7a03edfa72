"""What the hardware says about itself as events, every ten seconds while steps are done: heat and memory errors.

Corrected errors of a memory, and a temperature that nears the limit, come before the failure of the part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.launch.worker.recording.memory_samples import StepSamples
from torsh_distributed.observe.metrics.gpu_sensors import GpuSensors

_HWMON = Path("/sys/class/hwmon")
_EDAC = Path("/sys/devices/system/edac/mc")


class HardwareSamples(StepSamples):
    """Emits a HardwareEvent for the node, by its first rank, and for the GPU in use, `interval_s` or more apart."""

    def __init__(
        self, *, is_first_of_node: bool, interval_s: float = 10.0, hwmon: Path = _HWMON, edac: Path = _EDAC
    ) -> None:
        self._is_first_of_node = is_first_of_node
        self._hwmon = hwmon
        self._edac = edac
        self._gpus = GpuSensors()
        super().__init__(interval_s)

    @override
    def sample(self) -> None:
        for found in (self._host() if self._is_first_of_node else None, self._gpu()):
            if found is not None:
                events.emit(found)

    def _host(self) -> events.HardwareEvent | None:
        """The sensor nearest to its limit, and the errors of all memory controllers; None if neither is measured."""
        temperatures = list(_temperatures(self._hwmon))
        celsius, limit = min(temperatures, key=lambda one: one[1] - one[0]) if temperatures else (None, None)
        corrected, uncorrected = (_total(self._edac, name) for name in ("ce_count", "ue_count"))
        if celsius is None and corrected is None and uncorrected is None:
            return None
        return events.HardwareEvent(
            device="host",
            celsius=celsius,
            limit_celsius=limit,
            corrected_errors=corrected,
            uncorrected_errors=uncorrected,
        )

    def _gpu(self) -> events.HardwareEvent | None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        from torsh_distributed.launch.torch_internals import _get_nvml_device_index

        device = torch.cuda.current_device()
        try:
            found = {reading.index: reading for reading in self._gpus.read()}
        except FeatureNotAvailable:  # the node's own sensors say so, once
            return None
        # The driver counts all GPUs, CUDA those that this process may see.
        reading = found.get(_get_nvml_device_index(device))
        if reading is None:
            return None
        return events.HardwareEvent(
            device=f"cuda:{device}",
            celsius=reading.celsius,
            limit_celsius=reading.limit_celsius,
            corrected_errors=reading.corrected_errors,
            uncorrected_errors=reading.uncorrected_errors,
            utilization=reading.utilization,
        )


def _temperatures(hwmon: Path) -> Iterator[tuple[float, float]]:
    """Every sensor that has a limit: its temperature and the limit."""
    for sensor in sorted(hwmon.glob("hwmon*/temp*_input")):
        stem = sensor.name.removesuffix("_input")
        limit = _number(sensor.with_name(f"{stem}_crit")) or _number(sensor.with_name(f"{stem}_max"))
        now = _number(sensor)
        if now is not None and limit is not None and limit > 0:
            yield now / 1e3, limit / 1e3


def _total(edac: Path, name: str) -> int | None:
    """A count of errors over all memory controllers; None without one."""
    counts = [count for path in sorted(edac.glob(f"mc*/{name}")) if (count := _number(path)) is not None]
    return sum(counts) if counts else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or a sensor that does not answer now
        return None
