"""How much memory this process uses, and how much it could use at most as things are now."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GROUPS = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """What this process uses, and what it could use at most as things are now."""

    used_bytes: int
    limit_bytes: int


def host_memory() -> HostMemory:
    """Towards whichever limit is nearest: the process's own, its control group's, or the machine's."""
    pages = Path("/proc/self/statm").read_text().split()
    resident, data = int(pages[1]) * _PAGE_BYTES, int(pages[5]) * _PAGE_BYTES
    shared = [
        resident + free for free in (_machine_free_bytes(), *map(_group_free_bytes, _groups())) if free is not None
    ]
    found = [HostMemory(resident, min(shared))] if shared else [HostMemory(resident, sys.maxsize)]
    own, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if own != resource.RLIM_INFINITY:
        found.append(HostMemory(data, own))  # it counts what is mapped, not what is resident
    return min(found, key=lambda one: one.limit_bytes - one.used_bytes)


def memory_use() -> dict[str, int]:
    """Bytes in use and the most there can be, of the host and of the GPU that is in use."""
    used, limit = host_memory()
    found = {"host_used": used, "host_limit": limit}
    cuda = sys.modules.get("torch.cuda")
    # Only if the program uses it: asking would open the device.
    if cuda is not None and getattr(cuda, "is_initialized", bool)():
        device = cuda.current_device()
        found["device_used"] = cuda.memory_reserved(device)
        found["device_limit"] = cuda.get_device_properties(device).total_memory
    return found


def _machine_free_bytes() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _groups() -> list[Path]:
    """The control groups of memory around this process, in either version, where they are usually mounted."""
    found = [_GROUPS, _GROUPS / "memory"]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found.append(_GROUPS / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            found.append(_GROUPS / "memory" / path.lstrip("/"))
    return found


def _group_free_bytes(group: Path) -> int | None:
    """What is left of a group's limit, pages that can be dropped included; None without a limit."""
    for limit, usage, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if most.isdigit():
            return max(0, int(most) - used + int(stat.get(idle, 0)))
    return None
