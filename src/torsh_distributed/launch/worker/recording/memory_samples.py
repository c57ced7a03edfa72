"""Memory of this process as events, about once a second while steps are done: trends of it tell of trouble early."""

from __future__ import annotations

import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from torsh_distributed import events


class StepSamples(ABC):
    """Takes a sample after steps that are `interval_s` or more apart, in their thread; from its making on."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0
        self._unsubscribe = events.subscribe(self._after_step, events.StepEvent)

    @abstractmethod
    def sample(self) -> None:
        """Emit what is measured now."""

    def close(self) -> None:
        """Stop emitting."""
        self._unsubscribe()

    def _after_step(self, event: events.Event) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            self.sample()


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GROUPS = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """What this process uses, and what it could use at most as things are now."""

    used_bytes: int
    limit_bytes: int


class MemorySamples(StepSamples):
    """Emits a MemoryEvent for the host, and for the GPU in use, after steps that are `interval_s` or more apart."""

    def __init__(self, *, interval_s: float = 1.0) -> None:
        self._peak_bytes = 0
        super().__init__(interval_s)

    @override
    def sample(self) -> None:
        used, limit = host_memory()
        self._peak_bytes = max(self._peak_bytes, used)
        events.emit(
            events.MemoryEvent(device="host", allocated_bytes=used, peak_bytes=self._peak_bytes, limit_bytes=limit)
        )
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            events.emit(
                events.MemoryEvent(
                    device=f"cuda:{device}",
                    allocated_bytes=torch.cuda.memory_reserved(device),
                    peak_bytes=torch.cuda.max_memory_reserved(device),
                    limit_bytes=torch.cuda.get_device_properties(device).total_memory,
                )
            )


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
