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
from torsh_distributed.observe.machine.machine_limits import check_limits
from torsh_distributed.observe.machine.network_checks import check_network
from torsh_distributed.observe.machine.variables import check_variables


def check_devices(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    """Everything about devices. Imports torch."""
    yield _gpus(environ, Path("/proc/driver/nvidia"), sorted(Path("/dev").glob("nvidia[0-9]*")))
    yield from _infiniband(Path("/sys/class/infiniband"))


def _gpus(environ: Mapping[str, str], driver: Path, nodes: list[Path]) -> DiagnosticResult:
    import torch

    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    visible = torch.cuda.device_count()
    data = {"device_files": len(nodes), "visible": visible, "cuda": torch.version.cuda}
    if not nodes and not visible:
        return DiagnosticResult(check_name="GPUs", description="none: backend torsh, on CPU", data=data)
    if visible:
        names = [torch.cuda.get_device_name(index) for index in range(visible)]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's
        text = f"{visible} of {max(len(nodes), visible)} visible: {', '.join(sorted(set(names)))}; NCCL {nccl}"
        return DiagnosticResult(check_name="GPUs", description=text, data={**data, "names": names})
    if hidden is not None and hidden.strip() in ("", "-1"):
        return DiagnosticResult(
            check_name="GPUs",
            severity=CheckSeverity.WARNING,
            description=f"{len(nodes)} GPUs, hidden by CUDA_VISIBLE_DEVICES={hidden!r}",
            reason="workers run on the CPU",
            remediation="unset CUDA_VISIBLE_DEVICES, if that is not wanted",
            data=data,
        )
    version = (driver / "version").read_text().splitlines()[0] if (driver / "version").exists() else "no driver loaded"
    why = "torch is built without CUDA" if torch.version.cuda is None else f"torch needs CUDA {torch.version.cuda}"
    return DiagnosticResult(
        check_name="GPUs",
        severity=CheckSeverity.ERROR,
        description=f"{len(nodes)} GPUs, but torch sees none: {why}; {version}",
        reason="workers run on the CPU, or fail when they ask for cuda",
        remediation="install torch's CUDA build, or a driver for its version of CUDA (nvidia-smi shows which)",
        data=data,
    )


def _infiniband(folder: Path) -> Iterator[DiagnosticResult]:
    if not folder.exists():
        return
    states = {
        f"{device.name}/{port.name}": (port / "state").read_text().strip().partition(": ")[2]
        for device in sorted(folder.iterdir())
        for port in sorted((device / "ports").glob("*"))
        if (port / "state").exists()
    }
    down = [name for name, state in states.items() if state != "ACTIVE"]
    yield DiagnosticResult(
        check_name="RDMA",
        severity=CheckSeverity.WARNING if down else CheckSeverity.OK,
        description=", ".join(f"{name} {state}" for name, state in states.items()) or "no ports",
        reason="nccl takes such a port and waits for it" if down else "",
        remediation=f"leave it out: NCCL_IB_HCA=^{','.join(name.partition('/')[0] for name in down)}" if down else "",
        data=states,
    )


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


def validate_environment(environ: Mapping[str, str] | None = None) -> list[DiagnosticResult]:
    """What is found on this machine, good and bad, in the order to read it in. Starts nothing and changes nothing."""
    chosen = os.environ if environ is None else environ
    return [
        *check_software(chosen),
        *check_variables(chosen),
        *check_network(chosen),
        *check_limits(),
        *check_devices(chosen),
    ]
