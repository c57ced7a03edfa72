"""GPUs and network cards: what the system has, and what torch sees of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult


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
