"""Limits of this process and machine: files, memory, shared memory, cores, disk."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult

_ADVISED_FILES = 65536
_LEAST_FILES = 1024
_LEAST_SHM_BYTES = 64 << 20
_ADVISED_SHM_BYTES = 1 << 30
_LEAST_MEMORY_BYTES = 8 << 30
_LEAST_DISK_BYTES = 1 << 30


def check_limits() -> Iterator[DiagnosticResult]:
    """Everything about limits."""
    yield _open_files()
    yield _locked_memory()
    yield _shared_memory(Path("/dev/shm"))  # noqa: S108 - the mount itself is what is looked at
    yield _memory()
    yield _cores()
    yield _temporary_disk()


def _open_files() -> DiagnosticResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    data = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY or soft >= _ADVISED_FILES:
        return DiagnosticResult(check_name="open files", description=f"ulimit -n is {soft}", data=data)
    return DiagnosticResult(
        check_name="open files",
        severity=CheckSeverity.ERROR
        if soft < _LEAST_FILES
        else CheckSeverity.NOTE
        if soft >= 4096
        else CheckSeverity.WARNING,
        description=f"ulimit -n is {soft} (up to {hard})",
        reason="connections, loader processes and shared tensors each take descriptors: large jobs run out",
        remediation=f"ulimit -n {min(hard, _ADVISED_FILES) if hard > 0 else _ADVISED_FILES}, "
        "or raise nofile in /etc/security/limits.conf",
        data=data,
    )


def _locked_memory() -> DiagnosticResult:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not Path("/sys/class/infiniband").exists():
        shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes; no RDMA device needs more"
        return DiagnosticResult(check_name="locked memory", description=f"ulimit -l is {shown}")
    return DiagnosticResult(
        check_name="locked memory",
        severity=CheckSeverity.WARNING,
        description=f"ulimit -l is {soft} bytes, and there is an RDMA device",
        reason="it cannot register memory",
        remediation="ulimit -l unlimited, or memlock in /etc/security/limits.conf; for Docker --ulimit memlock=-1",
    )


def _shared_memory(mount: Path) -> DiagnosticResult:
    if not os.access(mount, os.W_OK):
        return DiagnosticResult(
            check_name="shared memory",
            severity=CheckSeverity.ERROR,
            description=f"{mount} is missing or cannot be written",
            reason="ranks of one machine and loader processes exchange tensors there",
            remediation="mount it: mount -t tmpfs tmpfs /dev/shm",
        )
    total, _, free = shutil.disk_usage(mount)
    data = {"total_bytes": total, "free_bytes": free}
    text = f"{mount}: {free / 2**20:.0f} MiB free of {total / 2**20:.0f}"
    if free >= _ADVISED_SHM_BYTES:
        return DiagnosticResult(check_name="shared memory", description=text, data=data)
    return DiagnosticResult(
        check_name="shared memory",
        severity=CheckSeverity.ERROR if free < _LEAST_SHM_BYTES else CheckSeverity.WARNING,
        description=text,
        reason="a rank that writes past its end dies of SIGBUS; Docker gives a container 64 MiB",
        remediation="docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
        "remove what killed programs left there",
        data=data,
    )


def _memory() -> DiagnosticResult:
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        facts[name] = int(rest.split()[0]) * 1024
    total, available = facts["MemTotal"], facts.get("MemAvailable", facts["MemFree"])
    limit = _group_limit_bytes()
    if limit is not None and limit < total:
        total = limit
    text = f"{available / 2**30:.1f} GiB available of {total / 2**30:.1f}" + (
        " (control group)" if total == limit else ""
    )
    is_small = total < _LEAST_MEMORY_BYTES
    return DiagnosticResult(
        check_name="memory",
        severity=CheckSeverity.NOTE if is_small else CheckSeverity.OK,
        description=text,
        reason="every worker takes about 0.3 GiB before its model" if is_small else "",
        remediation="use fewer workers, or `[offload]` in the plan" if is_small else "",
        data={"total_bytes": total, "available_bytes": available, "limit_bytes": limit},
    )


def _group_limit_bytes() -> int | None:
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists():
            text = path.read_text().strip()
            return int(text) if text.isdigit() else None
    return None


def _cores() -> DiagnosticResult:
    usable, quota = len(os.sched_getaffinity(0)), _quota_cores()
    data = {"usable": usable, "quota": quota}
    if quota is not None and quota < usable:
        return DiagnosticResult(
            check_name="cores",
            severity=CheckSeverity.WARNING,
            description=f"{usable} cores are visible, but the control group has time for {quota:g}",
            reason="threads are started for the visible ones and then held up together",
            remediation=f"set OMP_NUM_THREADS so that workers × threads is at most {max(1, int(quota))}",
            data=data,
        )
    return DiagnosticResult(check_name="cores", description=f"{usable} usable cores", data=data)


def _quota_cores() -> float | None:
    path = Path("/sys/fs/cgroup/cpu.max")
    if not path.exists():
        return None
    quota, period = path.read_text().split()[:2]
    return int(quota) / int(period) if quota != "max" else None


def _temporary_disk() -> DiagnosticResult:
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if free >= _LEAST_DISK_BYTES:
        return DiagnosticResult(check_name="temporary files", description=f"{folder}: {free / 2**30:.1f} GiB free")
    return DiagnosticResult(
        check_name="temporary files",
        severity=CheckSeverity.WARNING,
        description=f"{folder}: {free / 2**20:.0f} MiB free",
        reason="the launcher keeps its sockets there, torch its compiled code",
        remediation="make room, or set TMPDIR",
        data={"free_bytes": free},
    )
