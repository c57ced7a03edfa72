"""What a GPU tells beside its energy: how much it computes, how warm it is, and who else computes on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torsh_distributed.green.meters.counter_meter import DeviceState
from torsh_distributed.observe.metrics.gpu_sensors import answer_of

_MAX_ANCESTORS = 64


class GpuState:
    """One GPU's, since the last reading. `note` hears once that another job has come.

    A counter has the energy of all who compute on the GPU. NVML samples which process computed, so this job's part of
    the computing time can be told: a share of time, not of energy, and it is called so.
    """

    def __init__(
        self, name: str, handle: Any, *, root_pid: int, note: Callable[[str], None], proc: Path = Path("/proc")
    ) -> None:
        """Any: a handle of the driver. Processes that descend from `root_pid` are this job's."""
        self._name = name
        self._handle = handle
        self._root_pid = root_pid
        self._note = note
        self._proc = proc
        self._own_pids: set[int] = set()
        """Also of those that have ended: the driver may still name them."""
        self._has_told = False
        self._last_us = 0
        self._own_share()  # what was before the job is not read again

    def read(self) -> DeviceState:
        """What it tells now."""
        import pynvml as nvml

        use = answer_of(nvml.nvmlDeviceGetUtilizationRates, self._handle)
        celsius = answer_of(nvml.nvmlDeviceGetTemperature, self._handle, nvml.NVML_TEMPERATURE_GPU)
        running = answer_of(nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()
        others = {int(one.pid) for one in running if not self._is_own(int(one.pid))}
        # In a container the driver may tell numbers of the machine outside: then nobody can say whose they are.
        num_others = len(others) if self._own_pids else 0
        share = self._own_share()
        if num_others and not self._has_told:
            self._has_told = True
            self._note(
                f"{self._name} is shared with another job: the report says this job's part of its computing time"
            )
        return DeviceState(
            utilization=None if use is None else use.gpu / 100,
            celsius=None if celsius is None else float(celsius),
            num_others=num_others,
            own_share=share if num_others else None,
        )

    def _own_share(self) -> float | None:
        """Of the samples since the last reading; None if there were none."""
        import pynvml as nvml

        samples = answer_of(nvml.nvmlDeviceGetProcessUtilization, self._handle, self._last_us) or ()
        self._last_us = max((int(one.timeStamp) for one in samples), default=self._last_us)
        total = sum(int(one.smUtil) for one in samples)
        own = sum(int(one.smUtil) for one in samples if self._is_own(int(one.pid)))
        return own / total if total > 0 else None

    def _is_own(self, pid: int) -> bool:
        if pid not in self._own_pids and self._descends(pid):
            self._own_pids.add(pid)
        return pid in self._own_pids

    def _descends(self, pid: int) -> bool:
        for _ in range(_MAX_ANCESTORS):
            if pid == self._root_pid:
                return True
            try:
                # The name of a process may have spaces and brackets in it.
                pid = int((self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return False
        return False
