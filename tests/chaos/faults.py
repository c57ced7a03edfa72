"""Faults from outside, beside those that a rank inflicts on itself (`torsh_distributed.elastic.inject`).

A rank says by `mark` which step it has reached; `wait_for_mark` waits until it has, and `kill`, `stop` and `resume` act
on its pid and return when the kernel has done it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path


def mark(folder: Path, *, step: int) -> None:
    """Record that this rank has reached `step`, for `wait_for_mark`."""
    path = folder / f"rank-{os.environ['RANK']}-step-{step}"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(path)


def wait_for_mark(folder: Path, *, rank: int, step: int, within_s: float = 20.0) -> int:
    """Wait until the rank has reached the step; returns its pid."""
    path = folder / f"rank-{rank}-step-{step}"
    _poll(path.exists, within_s, f"rank {rank} did not reach step {step}")
    return int(path.read_text())


def kill(pid: int, *, within_s: float = 10.0) -> None:
    """SIGKILL; returns when the process has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], within_s)[0]:
            raise TimeoutError(f"process {pid} did not end within {within_s} s of SIGKILL")
    finally:
        os.close(pidfd)


def stop(pid: int, *, within_s: float = 10.0) -> None:
    """SIGSTOP; returns when every thread of the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    _poll(lambda: process_state(pid) == "T", within_s, f"process {pid} did not stop")


def resume(pid: int, *, within_s: float = 10.0) -> None:
    """SIGCONT; returns when the process runs again or has ended."""
    os.kill(pid, signal.SIGCONT)
    _poll(lambda: process_state(pid) != "T", within_s, f"process {pid} did not continue")


def process_state(pid: int) -> str | None:
    """The kernel's letter: R running, S sleeping, T stopped, Z zombie; None once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _poll(condition: Callable[[], bool], within_s: float, complaint: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{complaint} within {within_s} s")
        time.sleep(0.005)
