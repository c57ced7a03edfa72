"""Versions, compiled parts, compilers and caches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from torsh_distributed.native import SHM_CORE
from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult

TORCH_SUPPORTED = ((2, 11), (2, 13))
_LEAST_CACHE_BYTES = 1 << 30


def check_software(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    """Everything about installed software."""
    yield _python()
    yield _torch()
    yield _compiled_core()
    yield _compiler(environ)
    yield _cache(environ)


def _python() -> DiagnosticResult:
    found = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    is_linux = sys.platform == "linux"
    return DiagnosticResult(
        check_name="python",
        severity=CheckSeverity.OK if is_linux else CheckSeverity.ERROR,
        description=found,
        reason="" if is_linux else "launcher and shared memory need Linux",
        remediation="" if is_linux else "run on Linux",
        data={"version": platform.python_version(), "platform": sys.platform},
    )


def _torch() -> DiagnosticResult:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return DiagnosticResult(
            check_name="torch",
            severity=CheckSeverity.ERROR,
            description="torch is not installed for this Python",
            reason=f"every rank imports it ({sys.executable})",
            remediation="pip install torch, in the environment that runs the script",
        )
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = TORCH_SUPPORTED
    if low <= parts <= high:
        return DiagnosticResult(check_name="torch", description=f"torch {version}", data={"version": version})
    wanted = f"{'.'.join(map(str, low))} to {'.'.join(map(str, high))}"
    return DiagnosticResult(
        check_name="torch",
        severity=CheckSeverity.WARNING if parts > high else CheckSeverity.ERROR,
        description=f"torch {version}; this version of torsh-distributed is tested with {wanted}",
        reason="process groups use interfaces of torch that change between versions",
        remediation=f"install a torch from {wanted}",
        data={"version": version},
    )


def _compiled_core() -> DiagnosticResult:
    if SHM_CORE.target.exists():
        return DiagnosticResult(check_name="compiled core", description="the shm backend's compiled core is built")
    return DiagnosticResult(
        check_name="compiled core",
        severity=CheckSeverity.NOTE,
        description="the shm backend's compiled core is not built",
        reason=SHM_CORE.without_it,
        remediation="install a C compiler (gcc) and install torsh-distributed again",
    )


def _compiler(environ: Mapping[str, str]) -> DiagnosticResult:
    found = environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found:
        return DiagnosticResult(check_name="compiler", description=f"C++ compiler: {found}", data={"path": found})
    return DiagnosticResult(
        check_name="compiler",
        severity=CheckSeverity.NOTE,
        description="no C++ compiler",
        reason="torch.compile on CPU builds C++, and fails without one",
        remediation="install g++, or leave [compile] off",
    )


def _cache(environ: Mapping[str, str]) -> DiagnosticResult:
    folder = Path(environ.get("TORCHINDUCTOR_CACHE_DIR") or environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if not os.access(existing, os.W_OK):
        return DiagnosticResult(
            check_name="cache",
            severity=CheckSeverity.WARNING,
            description=f"{folder} cannot be written",
            reason="torch.compile, Triton and downloads keep their results there; each run starts over or fails",
            remediation="set TORCHINDUCTOR_CACHE_DIR and XDG_CACHE_HOME to directories of yours",
        )
    free = shutil.disk_usage(existing).free
    is_tight = free < _LEAST_CACHE_BYTES
    return DiagnosticResult(
        check_name="cache",
        severity=CheckSeverity.WARNING if is_tight else CheckSeverity.OK,
        description=f"{folder}: {free / 2**30:.1f} GiB free",
        reason="compiled kernels and models go there" if is_tight else "",
        remediation="make room, or set XDG_CACHE_HOME to a larger disk" if is_tight else "",
        data={"free_bytes": free},
    )
