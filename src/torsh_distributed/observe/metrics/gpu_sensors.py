"""Readings of NVIDIA GPUs through NVML, the driver's own library, by NVIDIA's package for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.errors import missing_extra

_log = logging.getLogger(__name__)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU now; None for what it does not measure."""

    index: int
    utilization: float | None
    """Share of time in which a kernel ran, from 0 to 1."""
    used_bytes: int | None
    total_bytes: int | None
    celsius: int | None
    limit_celsius: int | None
    """Where it starts to slow itself down."""
    corrected_errors: int | None
    """Errors that its memory corrected, since the driver was loaded."""
    uncorrected_errors: int | None
    power_w: float | None
    energy_j: float | None
    """Since the driver was loaded."""

    @property
    def used_share(self) -> float | None:
        """Part of its memory that is in use, from 0 to 1."""
        return self.used_bytes / self.total_bytes if self.used_bytes is not None and self.total_bytes else None


class GpuSensors:
    """The GPUs of this node; none if there is no driver. Opened at the first reading."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] | None = None

    def read(self) -> list[GpuReading]:
        """A reading of every GPU. Raises FeatureNotAvailable where there is a driver and not the package."""
        if self._handles is None:
            self._handles = open_gpus()
        return [_reading(index, handle) for index, handle in self._handles.items()]


def open_gpus() -> dict[int, Any]:
    """The driver's handles by index; none without a driver. Raises FeatureNotAvailable without NVIDIA's package."""
    try:
        import pynvml
    except ImportError as error:
        if _DRIVER.exists():
            raise missing_extra("gpu", "reading GPUs (utilization, memory, heat, power, errors)") from error
        return {}
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        _log.info("no GPU is read: %s", error)
        return {}
    handles = {index: answer_of(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)}
    return {index: handle for index, handle in handles.items() if handle is not None}


def _reading(index: int, handle: Any) -> GpuReading:
    import pynvml as nvml

    use = answer_of(nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = answer_of(nvml.nvmlDeviceGetMemoryInfo, handle)
    milliwatts = answer_of(nvml.nvmlDeviceGetPowerUsage, handle)
    millijoules = answer_of(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    corrected, uncorrected = (
        answer_of(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)
        for kind in (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    )
    return GpuReading(
        index=index,
        utilization=None if use is None else use.gpu / 100,
        used_bytes=None if memory is None else memory.used,
        total_bytes=None if memory is None else memory.total,
        celsius=answer_of(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        limit_celsius=answer_of(
            nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        ),
        corrected_errors=corrected,
        uncorrected_errors=uncorrected,
        power_w=None if milliwatts is None else milliwatts / 1e3,
        energy_j=None if millijoules is None else millijoules / 1e3,
    )


def answer_of(ask: Callable[..., Any], *args: Any) -> Any:
    """What the driver answers; None for what this GPU does not measure."""
    import pynvml

    try:
        return ask(*args)
    except pynvml.NVMLError:
        return None
