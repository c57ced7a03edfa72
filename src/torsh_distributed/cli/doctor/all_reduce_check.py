"""A real all-reduce of known values on two processes, started by the launcher itself: the last check of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult

_NUM_RANKS = 2
_LIMIT_S = 120.0
_SHOWN_LINES = 8


def check_all_reduce() -> DiagnosticResult:
    """Start two ranks, sum known values on every usable backend, compare; says how long it took."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torsh-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        command = [
            *(sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", str(_NUM_RANKS)),
            *("-m", "torsh_distributed.cli.doctor.all_reduce_worker", str(answer)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, cwd=folder)
            problem = (
                "" if done.returncode == 0 else "\n".join((done.stderr + done.stdout).splitlines()[-_SHOWN_LINES:])
            )
        except subprocess.TimeoutExpired:
            problem = f"no end within {_LIMIT_S:g} s"
        took = json.loads(answer.read_text()) if answer.exists() else {}
    wall_s = time.monotonic() - started_s
    if problem:
        return DiagnosticResult(
            check_name="all-reduce",
            severity=CheckSeverity.ERROR,
            description=f"an all-reduce of {_NUM_RANKS} processes failed: {problem}",
            reason="every training step does this",
            remediation="the lines above are the launcher's report on it; the checks above may say why",
            data=took,
        )
    shown = ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in took.items())
    return DiagnosticResult(
        check_name="all-reduce",
        description=f"{_NUM_RANKS} processes summed known values in {wall_s:.1f} s; 4 KiB take {shown}",
        data=took,
    )
