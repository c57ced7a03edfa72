"""What a process has used so far, as the kernel counts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Seconds of CPU, in user code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """The most memory it had at once."""
    return _bytes_of(pid, "status", "VmHWM")


def peak_together_bytes(pids: Sequence[int]) -> int:
    """The most memory of processes that are alive; pages that they share, such as libraries, count once."""
    shared = {pid: _bytes_of(pid, "smaps_rollup", "Shared_Clean", "Shared_Dirty") for pid in pids}
    own = sum(peak_bytes(pid) - shared[pid] for pid in pids)
    return own + max(shared.values())


def _bytes_of(pid: int, file: str, *names: str) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0].rstrip(":") in names)


def children_of(pid: int) -> list[int]:
    """Processes that it has started and that have not ended."""
    return [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()]
