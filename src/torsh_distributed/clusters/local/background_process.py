"""The process behind `background_jobs`: starts a job's command, passes signals on, and writes down how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torsh_distributed.clusters.job_records import write_private
from torsh_distributed.clusters.local.background_jobs import EXIT_FILE, LOG_FILE, PROCESS_FILE, boot_id, start_ticks
from torsh_distributed.private_files import open_private

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S = 40.0  # beyond the 25 s that launchers give workers to save


def main(folder: Path) -> None:
    """Read the order from stdin, run it, and leave `exit.json`."""
    order = json.loads(sys.stdin.buffer.read())
    # The submitter waits for the parent; the child is init's, so nobody has to wait for it.
    if os.fork():
        os._exit(0)
    os.setsid()
    log = open_private(folder / LOG_FILE, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        command = subprocess.Popen(
            order["command"],
            cwd=order["directory"],
            env=order["env"],
            stdin=nothing,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        sys.exit(f"{order['command'][0]}: {error.strerror or error}")
    watch = _Signals(command)
    for number in _ENDING:
        signal.signal(number, watch.take)
    me = {
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "boot": boot_id(),
        "host": socket.gethostname(),
    }
    write_private(folder / PROCESS_FILE, json.dumps(me))
    os.write(1, b"started\n")
    # The submitter closes its end: from now on there is nobody to talk to.
    for fd in (1, 2):
        os.dup2(log, fd)
    write_private(folder / EXIT_FILE, json.dumps(_run(command, watch, order["time_limit_s"])))


class _Signals:
    """The first signal goes to the command; the second kills it with all it started."""

    def __init__(self, command: subprocess.Popen[bytes]) -> None:
        self._command = command
        self._num_taken = 0

    def take(self, number: int, frame: FrameType | None) -> None:
        self._num_taken += 1
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if self._num_taken == 1:
                self._command.send_signal(number)
            else:
                os.killpg(self._command.pid, signal.SIGKILL)


def _run(
    command: subprocess.Popen[bytes], watch: _Signals, limit_s: float | None, grace_s: float = _GRACE_S
) -> dict[str, Any]:
    """Wait for the command; one that ignores the end of its time is killed after `grace_s`."""
    reason = ""
    try:
        code = command.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        reason = f"ended at its time limit of {limit_s:g} s"
        watch.take(signal.SIGTERM, None)
        try:
            code = command.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            watch.take(signal.SIGTERM, None)
            code = command.wait()
    return {"exit_code": code if code >= 0 else 128 - code, "reason": reason}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
