"""Readings of NVIDIA GPUs through NVML, the driver's own library, called directly: no package is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_TEMPERATURE_OF_GPU = 0
_SLOWDOWN = 1
_SINCE_LOADED = 0
_CORRECTED, _UNCORRECTED = 0, 1


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


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuSensors:
    """The GPUs of this node; none if there is no driver. Opened at the first reading."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._handles: list[ctypes.c_void_p] | None = None

    def read(self) -> list[GpuReading]:
        """A reading of every GPU."""
        if self._handles is None:
            self._handles = self._open()
        return [self._read_one(index, handle) for index, handle in enumerate(self._handles)]

    def _open(self) -> list[ctypes.c_void_p]:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:  # no driver: no GPU of this kind
            return []
        self._library = library
        count = ctypes.c_uint()
        if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
                handles.append(handle)
        return handles

    def _read_one(self, index: int, handle: ctypes.c_void_p) -> GpuReading:
        library = self._library
        assert library is not None, "a handle comes from the library"
        use, memory = _Utilization(), _Memory()
        has_use = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0
        has_memory = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        celsius = ctypes.c_uint()
        has_celsius = (
            library.nvmlDeviceGetTemperature(handle, ctypes.c_uint(_TEMPERATURE_OF_GPU), ctypes.byref(celsius)) == 0
        )
        limit = ctypes.c_uint()
        has_limit = (
            library.nvmlDeviceGetTemperatureThreshold(handle, ctypes.c_uint(_SLOWDOWN), ctypes.byref(limit)) == 0
        )
        milliwatts = _number(library.nvmlDeviceGetPowerUsage, handle, ctypes.c_uint())
        millijoules = _number(library.nvmlDeviceGetTotalEnergyConsumption, handle, ctypes.c_ulonglong())
        return GpuReading(
            index=index,
            utilization=use.gpu / 100 if has_use else None,
            used_bytes=memory.used if has_memory else None,
            total_bytes=memory.total if has_memory else None,
            celsius=celsius.value if has_celsius else None,
            limit_celsius=limit.value if has_limit else None,
            corrected_errors=self._memory_errors(handle, _CORRECTED),
            uncorrected_errors=self._memory_errors(handle, _UNCORRECTED),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            energy_j=None if millijoules is None else millijoules / 1e3,
        )

    def _memory_errors(self, handle: ctypes.c_void_p, kind: int) -> int | None:
        assert self._library is not None, "a handle comes from the library"
        count = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEccErrors(
            handle, ctypes.c_uint(kind), ctypes.c_uint(_SINCE_LOADED), ctypes.byref(count)
        )
        return count.value if code == 0 else None


def _number(
    function: Callable[..., int], handle: ctypes.c_void_p, room: ctypes.c_uint | ctypes.c_ulonglong
) -> int | None:
    return room.value if function(handle, ctypes.byref(room)) == 0 else None
