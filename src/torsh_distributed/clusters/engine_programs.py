"""Programs that engines call (sbatch, ssh, mpiexec, …): found on the PATH, run with a deadline, errors in words."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, OperationTimeout


def required_program(name: str, *, hint: str) -> str:
    """The program's path; raises FeatureNotAvailable if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise FeatureNotAvailable(f"the program {name!r} is not on the PATH", hint=hint, program=name)
    return path


def ask_program(
    command: Sequence[str], *, timeout_s: float, hint: str, stdin: str = "", env: Mapping[str, str] | None = None
) -> str:
    """What the program prints. Raises OperationTimeout, or CommunicationError with what it says against it."""
    try:
        done = subprocess.run(
            list(command), input=stdin, capture_output=True, text=True, timeout=timeout_s, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        raise OperationTimeout(
            f"`{command[0]}` did not answer within {timeout_s:g} s", hint=hint, operation=command[0]
        ) from None
    if done.returncode:
        raise CommunicationError(
            f"`{command[0]}` failed: {(done.stderr or done.stdout).strip() or 'it says nothing'}",
            hint=hint,
            operation=command[0],
            exit_code=done.returncode,
        )
    return done.stdout


def fixed_size(engine: str) -> FeatureNotAvailable:
    """The error of an engine whose jobs keep their size."""
    return FeatureNotAvailable(
        f"jobs on {engine!r} keep the size they were submitted with",
        hint="cancel the job and submit it again; its checkpoints load at any number of workers",
        engine=engine,
    )
