"""Jobs whose engine is not a service: a process of this machine runs them in the background and remembers their end.

A job's directory has `process.json` (which process runs it), `output.log`, and at the end `exit.json`. The process is
its own session: it outlives the terminal that submitted it, and is found again by pid and start time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_distributed.clusters.base import JobState, JobStatus
from torsh_distributed.clusters.job_records import job_directory, read_growing
from torsh_distributed.errors import CommunicationError, IoError, OperationTimeout
from torsh_distributed.private_files import state_directory
from torsh_distributed.unreadable_data import unreadable_as

PROCESS_FILE, EXIT_FILE, CANCEL_FILE, LOG_FILE = "process.json", "exit.json", "cancelled", "output.log"
_NUMBERS = {PROCESS_FILE: {"pid": 2**22, "start_ticks": 2**63}, EXIT_FILE: {"exit_code": 2**16}}
"""The numbers in each of the job's notes, and the most that each can be."""
_REMOVE = "remove the job's directory if the job is over"
_START_TIMEOUT_S = 60.0
_KILL_WAIT_S = 10.0


def start_in_background(
    name: str, command: Sequence[str], *, directory: Path, env: Mapping[str, str], time_limit_s: float | None = None
) -> None:
    """Run the command in the background as the job of that name; returns when it has started.

    `env` is the whole environment. It travels through a pipe: it may hold secrets and is not written down.
    """
    folder = job_directory(name)
    order = {"command": list(command), "directory": str(directory), "env": dict(env), "time_limit_s": time_limit_s}
    process = subprocess.Popen(
        [sys.executable, "-m", "torsh_distributed.clusters.local.background_process", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps(order).encode())
        process.stdin.close()
        said = process.stdout.readline() if _is_readable(process.stdout.fileno(), _START_TIMEOUT_S) else b""
        if said.strip() != b"started":
            process.kill()
            process.wait()
            rest = said + (process.stdout.read() if said else b"")
            raise IoError(
                "the job's process could not be started",
                hint="see its reason; the command is run as it is on this machine",
                command=" ".join(command),
                reason=rest.decode(errors="replace").strip() or f"no answer within {_START_TIMEOUT_S:g} s",
            )
    process.wait(timeout=_START_TIMEOUT_S)


def _is_readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def background_status(name: str) -> JobStatus:
    """Where the job stands."""
    folder = _folder(name)
    # Looked at first: a process that has ended since then has written how.
    is_running = _is_running(folder)
    ended = _read(folder / EXIT_FILE)
    if ended is not None:
        code = int(ended["exit_code"])
        if (folder / CANCEL_FILE).exists() and code:
            return JobStatus(state=JobState.CANCELLED, exit_code=code, detail="cancelled")
        state = JobState.FAILED if code else JobState.SUCCEEDED
        return JobStatus(state=state, exit_code=code, detail=str(ended.get("reason", "")))
    if is_running:
        return JobStatus(state=JobState.RUNNING)
    if not (folder / PROCESS_FILE).exists():
        return JobStatus(state=JobState.LOST, detail="no process of this machine runs it")
    elsewhere = _other_host(folder)
    if elsewhere is not None:
        return JobStatus(state=JobState.LOST, detail=f"its process was started on {elsewhere}: ask there")
    return JobStatus(
        state=JobState.LOST, detail="its process left no exit code: it was killed, or the machine restarted"
    )


def background_logs(name: str, *, follow: bool) -> Iterator[str]:
    """The output of the job so far; with `follow` until it is over."""
    path = _folder(name) / LOG_FILE
    return read_growing(lambda: [path], follow=follow, is_over=lambda: background_status(name).state.is_over)


def cancel_background(name: str, *, grace_s: float) -> None:
    """End the job: SIGTERM, and what still runs after `grace_s` is killed. Returns when it is over."""
    folder = _folder(name)
    pidfd = _pidfd_of(folder)
    if pidfd is None:
        elsewhere = _other_host(folder)
        if elsewhere is not None and _read(folder / EXIT_FILE) is None:
            raise CommunicationError(
                f"the job {name!r} was started on {elsewhere}, and only there it can be ended",
                hint=f"`torsh cancel {name}` on {elsewhere}",
                job=name,
            )
        return
    (folder / CANCEL_FILE).touch(mode=0o600)
    # The first asks the command to end; the second has it killed.
    for wait_s in (grace_s, _KILL_WAIT_S):
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        except ProcessLookupError:
            break
        if _is_readable(pidfd, wait_s):
            break
    else:
        os.close(pidfd)
        raise OperationTimeout(
            f"the job {name!r} does not end", hint="look for its processes by hand", operation="cancel", job=name
        )
    os.close(pidfd)


def _folder(name: str) -> Path:
    return state_directory() / "jobs" / name


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with unreadable_as(IoError, "a note of the job cannot be read", hint=_REMOVE, path=str(path)):
        found: dict[str, Any] = json.loads(path.read_bytes())
        for name, most in _NUMBERS[path.name].items():
            if type(found[name]) is not int or not 0 <= found[name] <= most:
                raise ValueError(f"{name} cannot be {str(found[name])[:60]!r}")
        return found


def start_ticks(pid: int) -> int | None:
    """When the process started, in the kernel's ticks since boot; None if there is none, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _other_host(folder: Path) -> str | None:
    """The machine that runs the job, if it is another one: several may share a state directory."""
    noted = _read(folder / PROCESS_FILE)
    if noted is None or noted.get("boot") == boot_id() or noted.get("host") in (None, socket.gethostname()):
        return None
    return str(noted["host"])


def _pidfd_of(folder: Path) -> int | None:
    """The process that runs the job; None if it is gone. Its pid may be another process's by now."""
    noted = _read(folder / PROCESS_FILE)
    if noted is None or noted.get("boot") != boot_id():
        return None
    pid = int(noted["pid"])
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if start_ticks(pid) == noted["start_ticks"]:
        return pidfd
    os.close(pidfd)
    return None


def _is_running(folder: Path) -> bool:
    pidfd = _pidfd_of(folder)
    if pidfd is None:
        return False
    os.close(pidfd)
    return True


def boot_id() -> str:
    """Which boot of which machine this is: a state directory may be shared by several."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
