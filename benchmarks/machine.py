"""Where and when a result was measured; numbers mean nothing without their machine."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the numbers depend on."""

    cpu: str
    num_cores: int
    """Cores this process may use."""
    memory_gb: float
    """2**30 bytes."""
    gpus: list[str]
    kernel: str
    python: str
    torch: str
    load_before: float
    """Processes that wanted a core in the minute before: near 0 on a quiet machine."""
    date: str
    commit: str
    """The commit measured, with `+changes` if files were modified."""

    def is_like(self, other: Machine) -> bool:
        """Whether numbers from here and there belong into one table."""
        names = ("cpu", "num_cores", "memory_gb", "gpus", "kernel", "python", "torch")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def has_same_torch(self, other: Machine) -> bool:
        """Whether both have one version of torch, built for whatever devices."""
        return self.torch.partition("+")[0] == other.torch.partition("+")[0]


def describe_machine() -> Machine:
    """Describe this machine."""
    return Machine(
        cpu=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        load_before=round(os.getloadavg()[0], 2),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
    )


def _cpu_model() -> str:
    """The name that lscpu prints, or the architecture: /proc/cpuinfo has no name on ARM."""
    try:
        listing = subprocess.run(
            ["lscpu"], capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"}
        )
    except FileNotFoundError:
        return platform.machine()
    for line in listing.stdout.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Model name":
            return f"{value.strip()} ({platform.machine()})"
    return platform.machine()


def _commit() -> str:
    """The checked-out commit; "unknown" outside a repository."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
