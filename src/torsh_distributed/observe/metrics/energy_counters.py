"""The counters of energy that a node has: of its GPUs (NVML), of its processors (RAPL) and of its boards (hwmon).

Each one counts joules from a moment of its own; what is used are differences. Whoever reads them decides how often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torsh_distributed.observe.metrics.gpu_sensors import answer_of, open_gpus

POWERCAP = Path("/sys/class/powercap")
HWMON = Path("/sys/class/hwmon")
_MAX_PACKAGE_W = 2000.0
_MAX_BOARD_W = 50_000.0
_SOCKET_CHIPS = ("amd_energy",)
_WHOLE_NODE_CHIPS = ("power_meter", "acpi_power_meter")


class EnergyCounter(Protocol):
    """Joules since some moment. Reading raises OSError if this user may not, or if it does not answer."""

    name: str
    source: str
    """nvml, rapl or hwmon."""
    max_w: float
    """More than this it cannot have counted: the number would be wrong."""
    range_j: float | None
    """Where it starts over from zero, if it does."""

    def read_j(self) -> float:
        """The count now."""


class RaplCounter:
    """A processor package's own counter; for root alone on most kernels. It starts over every few minutes to hours."""

    source = "rapl"

    def __init__(self, zone: Path) -> None:
        self._zone = zone
        self.name = (zone / "name").read_text().strip()[:60] or zone.name
        self.range_j: float | None = int((zone / "max_energy_range_uj").read_text()) / 1e6
        self.max_w = _MAX_PACKAGE_W

    def read_j(self) -> float:
        """The count now."""
        return int((self._zone / "energy_uj").read_text()) / 1e6


def rapl_counters(powercap: Path = POWERCAP) -> list[RaplCounter]:
    """One for each package, and for memory that is outside of them; parts of a package are in the package's own.

    Whether this user may read them shows at the first reading.
    """
    zones = sorted(powercap.glob("intel-rapl:*"))
    return [RaplCounter(zone) for zone in zones if zone.name.count(":") == 1 and (zone / "name").is_file()]


class HwmonEnergyCounter:
    """A socket's counter that a driver shows under hwmon."""

    source = "hwmon"
    range_j: float | None = None
    max_w = _MAX_PACKAGE_W

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self.name = name

    def read_j(self) -> float:
        """The count now."""
        return int(self._path.read_text()) / 1e6


class IntegratedPower:
    """A count made of readings of power: each holds until the next one."""

    range_j: float | None = None

    def __init__(self, name: str, source: str, read_w: Callable[[], float], *, max_w: float = _MAX_BOARD_W) -> None:
        self.name = name
        self.source = source
        self.max_w = max_w
        self._read_w = read_w
        self._total_j = 0.0
        self._last: tuple[float, float] | None = None

    def read_j(self) -> float:
        """The count now."""
        now_s, power_w = time.monotonic(), self._read_w()
        if self._last is not None:
            before_s, before_w = self._last
            self._total_j += (now_s - before_s) * (before_w + power_w) / 2
        self._last = now_s, power_w
        return self._total_j


def hwmon_counters(hwmon: Path = HWMON) -> tuple[list[EnergyCounter], list[EnergyCounter]]:
    """(of sockets, of the whole node with everything in it)."""
    sockets: list[EnergyCounter] = []
    whole: list[EnergyCounter] = []
    for chip in sorted(hwmon.glob("hwmon*")):
        name = _text(chip / "name")
        if name in _SOCKET_CHIPS:
            sockets += [HwmonEnergyCounter(path, label) for path, label in _sockets(chip)]
        elif name in _WHOLE_NODE_CHIPS:
            found = next((chip / file for file in ("power1_average", "power1_input") if (chip / file).exists()), None)
            if found is not None:
                whole.append(IntegratedPower(f"whole node ({chip.name})", "hwmon", _watts_of(found)))
    return sockets, whole


def _sockets(chip: Path) -> Iterator[tuple[Path, str]]:
    """Counters of sockets; those of cores are in them."""
    for path in sorted(chip.glob("energy*_input")):
        label = _text(path.with_name(path.name.replace("_input", "_label")))
        if label.lower().startswith("esocket"):
            yield path, label


def _watts_of(path: Path) -> Callable[[], float]:
    return lambda: int(path.read_text()) / 1e6


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()[:60]
    except OSError:
        return ""


class GpuCounter:
    """A GPU's counter, in millijoules since the driver was loaded; it moves about ten times a second."""

    source = "nvml"
    range_j: float | None = None

    def __init__(self, index: int, handle: Any, *, max_w: float) -> None:
        """Any: a handle of the driver."""
        self.name = f"gpu {index}"
        self.handle = handle
        self.max_w = max_w

    def read_j(self) -> float:
        """The count now."""
        import pynvml

        counted = answer_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, self.handle)
        if counted is None:
            raise OSError(f"{self.name} does not answer")
        return float(counted) / 1e3


def gpu_counters(visible: str | None = None) -> list[EnergyCounter]:
    """Of the GPUs that `visible`, as CUDA_VISIBLE_DEVICES has them, names; in that order, of all if it is None.

    A GPU that counts no energy is integrated from its power; one that tells neither is left out. A MIG slice has no
    counter of its own: its GPU's is taken. Raises FeatureNotAvailable where there is a driver and not the package.
    """
    import importlib.util

    handles = open_gpus()
    if not handles or importlib.util.find_spec("pynvml") is None:
        return []
    found: list[EnergyCounter] = []
    for index in chosen_gpus(handles, visible):
        counter = _gpu_counter(index, handles[index])
        if counter is not None:
            found.append(counter)
    return found


def processes_on_gpus(visible: str | None = None) -> dict[str, int]:
    """How many processes compute on each of these GPUs now, by the name of its counter; of those that have any."""
    import importlib.util

    handles = open_gpus()
    if not handles or importlib.util.find_spec("pynvml") is None:
        return {}
    import pynvml as nvml

    found = {
        f"gpu {index}": len(answer_of(nvml.nvmlDeviceGetComputeRunningProcesses, handles[index]) or ())
        for index in chosen_gpus(handles, visible)
    }
    return {name: count for name, count in found.items() if count}


def _gpu_counter(index: int, handle: Any) -> EnergyCounter | None:
    import pynvml as nvml

    limits = answer_of(nvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
    max_w = 1.5 * limits[1] / 1e3 if limits is not None else _MAX_PACKAGE_W
    if answer_of(nvml.nvmlDeviceGetTotalEnergyConsumption, handle) is not None:
        return GpuCounter(index, handle, max_w=max_w)
    if answer_of(nvml.nvmlDeviceGetPowerUsage, handle) is None:
        return None

    def read_w() -> float:
        milliwatts = answer_of(nvml.nvmlDeviceGetPowerUsage, handle)
        if milliwatts is None:
            raise OSError(f"gpu {index} does not answer")
        return float(milliwatts) / 1e3

    return IntegratedPower(f"gpu {index}", "nvml", read_w, max_w=max_w)


def chosen_gpus(handles: dict[int, Any], visible: str | None) -> list[int]:
    """Indices of the driver: a name of CUDA's may be an index, or the beginning of a UUID. An empty list hides all."""
    if visible is None:
        return list(handles)
    import pynvml as nvml

    uuids = {index: str(answer_of(nvml.nvmlDeviceGetUUID, handle) or "") for index, handle in handles.items()}
    found: list[int] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdigit() and int(name) in handles:
            found.append(int(name))
        elif name.startswith("GPU-"):
            found += [index for index, uuid in uuids.items() if uuid.startswith(name)]
        elif name.startswith("MIG-"):
            # Which GPU a slice is of, only the driver knows; with one GPU there is no choice.
            found += list(handles) if len(handles) == 1 else []
        else:
            break  # CUDA takes none after one that it does not know
    return list(dict.fromkeys(found))
