"""The driver's power limit of GPUs: set for a job, and put back to what was found, however the job ends.

The limits that were found are in a file before any is changed. The launcher restores from it; if it is killed, its
guardian runs this module with that file. Restoring twice, or what was never changed, does no harm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torsh_distributed.green.power.found_values import write_found
from torsh_distributed.observe.metrics.energy_counters import chosen_gpus
from torsh_distributed.observe.metrics.gpu_sensors import answer_of, open_gpus

Note = Callable[[str], None]


def restoring_command(record: Path) -> list[str]:
    """What puts the limits of `record` back, in a process of its own."""
    return [sys.executable, "-m", __name__, str(record)]


def limit_gpus(limit_w: float, *, visible: str | None, record: Path, note: Note) -> bool:
    """Set the limit of the GPUs that `visible` names; whether any was changed. What is refused is noted, by name."""
    handles = open_gpus()
    chosen = [(index, handles[index]) for index in chosen_gpus(handles, visible)]
    if not chosen:
        note("green.gpu_limit_w is refused: no GPU of NVIDIA's driver is here for this job")
        return False
    import pynvml as nvml

    found: dict[str, int] = {}
    for index, handle in chosen:
        why = _refusal(index, handle, limit_w)
        limit_mw = answer_of(nvml.nvmlDeviceGetPowerManagementLimit, handle)
        if why is None and limit_mw is None:
            why = f"gpu {index} has no power limit that can be read"
        if why is not None:
            note(f"green.gpu_limit_w is refused: {why}")
            return False
        found[str(nvml.nvmlDeviceGetUUID(handle))] = int(limit_mw)
    write_found(record, found)
    for index, handle in chosen:
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(handle, round(limit_w * 1e3))
        except nvml.NVMLError as error:
            restore_limits(record, note=note)
            hint = "that needs root; green.power_cap_w paces the steps instead"
            note(
                f"green.gpu_limit_w is refused: the driver does not let this user change gpu {index} ({error}): {hint}"
            )
            return False
    told = ", ".join(f"gpu {index}" for index, _ in chosen)
    before = ", ".join(f"{limit_mw / 1e3:g} W" for limit_mw in found.values())
    note(f"{told}: limited to {limit_w:g} W; {before} is put back at the end")
    return True


def restore_limits(record: Path, *, note: Note) -> None:
    """Put back what was found, and forget it; nothing happens without a record."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return
    handles = open_gpus()
    import pynvml as nvml

    by_uuid = {str(answer_of(nvml.nvmlDeviceGetUUID, handle)): handle for handle in handles.values()}
    is_whole = True
    for uuid, limit_mw in found.items():
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(by_uuid[uuid], int(limit_mw))
        except (nvml.NVMLError, KeyError) as error:
            if answer_of(nvml.nvmlDeviceGetPowerManagementLimit, by_uuid.get(uuid)) != limit_mw:
                is_whole = False
                note(f"the power limit of {uuid} could not be put back to {limit_mw / 1e3:g} W: {error}")
    if is_whole:
        record.unlink(missing_ok=True)


def _refusal(index: int, handle: Any, limit_w: float) -> str | None:
    """Why this GPU must not or cannot be limited."""
    import pynvml as nvml

    others: Sequence[Any] = answer_of(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    if others:
        return f"gpu {index} is in use by {len(others)} other processes, which would be slowed too"
    range_mw = answer_of(nvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
    if range_mw is not None and not range_mw[0] <= limit_w * 1e3 <= range_mw[1]:
        return f"gpu {index} takes limits from {range_mw[0] / 1e3:g} to {range_mw[1] / 1e3:g} W"
    return None


if __name__ == "__main__":
    restore_limits(Path(sys.argv[1]), note=lambda text: print(f"torsh run: {text}", file=sys.stderr))
