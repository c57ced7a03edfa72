"""All meters of a node, read by one process of it. What cannot be measured is estimated, and says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.green.meters.counter_meter import CounterMeter, DeviceState, MeterReading
from torsh_distributed.green.meters.gpu_state import GpuState
from torsh_distributed.green.meters.load_estimate import LoadEstimate
from torsh_distributed.observe.metrics.energy_counters import (
    HWMON,
    POWERCAP,
    EnergyCounter,
    GpuCounter,
    gpu_counters,
    hwmon_counters,
    processes_on_gpus,
    rapl_counters,
)

_log = logging.getLogger(__name__)
_PLATFORM = "psys"
"""A RAPL zone that counts the packages once more."""


class NodeMeter:
    """Reads every meter of this node. `notes` says what is not measured, and why.

    A meter of the whole node replaces all others: they would count twice. Else GPUs are counted by NVML, processors by
    RAPL or hwmon, or estimated from their load.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        now_s: float,
        visible_gpus: str | None = None,
        full_w: float | None = None,
        powercap: Path = POWERCAP,
        hwmon: Path = HWMON,
        root_pid: int | None = None,
    ) -> None:
        """`visible_gpus` is CUDA_VISIBLE_DEVICES of the job. Processes that descend from `root_pid` are the job's; None
        stands for those of this process."""
        self.notes: list[str] = []
        self._meters: list[CounterMeter | LoadEstimate] = []
        everyone = tuple(ranks)
        sockets, whole = hwmon_counters(hwmon)
        self._meters += self._opened(whole, everyone, now_s)
        if self._meters:
            return
        gpus = self._gpus(visible_gpus)
        # Read before the first worker starts: who computes there now is another job.
        others = processes_on_gpus(visible_gpus) if gpus else {}
        for number, gpu in enumerate(gpus):
            # As `init()` does: local rank r takes the visible GPU r, and starts over where there are fewer.
            sharing = tuple(rank for local, rank in enumerate(everyone) if local % len(gpus) == number)
            count = others.get(gpu.name, 0)
            who = "process" if count == 1 else "processes"
            remark = f"in use by {count} other {who}, whose energy is in this number too" if count else None
            if remark is not None:
                self.notes.append(f"{gpu.name} is {remark}")
            state = None
            if isinstance(gpu, GpuCounter):
                root = os.getpid() if root_pid is None else root_pid
                state = GpuState(gpu.name, gpu.handle, root_pid=root, note=self.notes.append).read
            self._meters += self._opened([gpu], sharing or everyone, now_s, remark, state)
        packages: list[EnergyCounter] = [one for one in rapl_counters(powercap) if one.name != _PLATFORM]
        opened = self._opened(packages, everyone, now_s) or self._opened(sockets, everyone, now_s)
        if not opened:
            estimate = LoadEstimate(everyone, now_s=now_s, full_w=full_w)
            self.notes.append(f"the processors' energy is estimated: {estimate.formula}")
            opened = [estimate]
        self._meters += opened

    def _gpus(self, visible: str | None) -> list[EnergyCounter]:
        try:
            return gpu_counters(visible)
        except FeatureNotAvailable as error:
            self.notes.append(f"GPUs are not measured: {error.message} ({error.hint})")
            return []

    def _opened(
        self,
        counters: Sequence[EnergyCounter],
        ranks: tuple[int, ...],
        now_s: float,
        remark: str | None = None,
        read_state: Callable[[], DeviceState] | None = None,
    ) -> list[CounterMeter | LoadEstimate]:
        """Meters of those that can be read."""
        found: list[CounterMeter | LoadEstimate] = []
        for counter in counters:
            try:
                found.append(CounterMeter(counter, ranks, now_s=now_s, remark=remark, read_state=read_state))
            except PermissionError:
                self.notes.append(f"{counter.name} cannot be read by this user ({counter.source}): that needs root")
            except (OSError, ValueError) as error:
                self.notes.append(f"{counter.name} cannot be read ({counter.source}): {error}")
        return found

    @property
    def is_measured(self) -> bool:
        """Whether nothing is estimated."""
        return not any(isinstance(meter, LoadEstimate) for meter in self._meters)

    def read(self, now_s: float) -> list[MeterReading]:
        """What each has counted since the last reading. One that fails is said to, and is not read again."""
        readings = []
        for meter in list(self._meters):
            try:
                readings.append(meter.read(now_s))
            except (OSError, ValueError) as error:
                self._meters.remove(meter)
                name = "the load of the processors" if isinstance(meter, LoadEstimate) else meter.counter.name
                self.notes.append(f"{name} is not read any more: {error}")
                _log.warning("%s is not read any more: %s", name, error)
        return readings
