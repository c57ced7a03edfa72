"""Jobs in the background of this machine: they outlive their submitter, and any process finds them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.jobs import wait_for_text
from torsh_distributed.clusters.base import JobState
from torsh_distributed.clusters.local.background_jobs import (
    background_logs,
    background_status,
    cancel_background,
    start_in_background,
)
from torsh_distributed.clusters.local.background_process import _run, _Signals
from torsh_distributed.errors import CommunicationError, IoError

pytestmark = pytest.mark.ranks

STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def python(*words: str) -> list[str]:
    return [sys.executable, "-c", *words]


def start(name: str, command: list[str], tmp_path: Path, time_limit_s: float | None = None) -> None:
    start_in_background(name, command, directory=tmp_path, env=dict(os.environ), time_limit_s=time_limit_s)


def test_a_job_is_followed_to_its_end_and_remembered(state_dir: Path, tmp_path: Path) -> None:
    start("good", python("print('one'); print('two', end='')"), tmp_path)
    start("bad", python("import sys; sys.exit(3)"), tmp_path)
    start("slow", python("import time; time.sleep(600)"), tmp_path, time_limit_s=0.2)
    assert list(background_logs("good", follow=True)) == ["one", "two"]
    assert background_status("good").exit_code == 0
    assert list(background_logs("bad", follow=True)) == []
    assert (background_status("bad").state, background_status("bad").exit_code) == (JobState.FAILED, 3)
    assert list(background_logs("slow", follow=True)) == []
    slow = background_status("slow")
    assert (slow.state, slow.exit_code, slow.detail) == (JobState.FAILED, 143, "ended at its time limit of 0.2 s")
    cancel_background("good", grace_s=1.0)
    assert background_status("good").state is JobState.SUCCEEDED
    assert background_status("unknown").state is JobState.LOST


def test_cancelling_ends_what_ignores_it_too(state_dir: Path, tmp_path: Path) -> None:
    start("stubborn", python(STUBBORN, str(tmp_path / "child")), tmp_path)
    child = int(wait_for_text(tmp_path / "child"))
    assert background_status("stubborn").state is JobState.RUNNING
    cancel_background("stubborn", grace_s=0.2)
    assert background_status("stubborn").state is JobState.CANCELLED
    with pytest.raises(ProcessLookupError):
        for _ in range(3000):
            os.kill(child, 0)
            time.sleep(0.02)


def test_a_job_outlives_the_session_that_submitted_it_and_its_killed_process_is_noticed(
    state_dir: Path, tmp_path: Path
) -> None:
    code = (
        "import os, pathlib; from torsh_distributed.clusters.local.background_jobs import start_in_background as s;"
        f"s('kept', {python('import time; time.sleep(600)')!r}, directory=pathlib.Path('/'), env=dict(os.environ))"
    )
    subprocess.run(python(code), check=True, start_new_session=True, timeout=60)
    assert background_status("kept").state is JobState.RUNNING
    pid = json.loads((state_dir / "jobs/kept/process.json").read_text())["pid"]
    command = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    os.kill(pid, signal.SIGKILL)
    os.kill(command, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (status := background_status("kept")).state is JobState.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert status.state is JobState.LOST
    assert "left no exit code" in status.detail


def test_a_job_of_another_machine_is_not_called_cancelled(state_dir: Path, tmp_path: Path) -> None:
    """Machines that share a home directory share its records."""
    start("far", python("pass"), tmp_path)
    assert list(background_logs("far", follow=True)) == []
    folder = state_dir / "jobs/far"
    (folder / "exit.json").unlink()
    noted = json.loads((folder / "process.json").read_text())
    (folder / "process.json").write_text(json.dumps({**noted, "boot": "another", "host": "login2"}))
    assert background_status("far").detail == "its process was started on login2: ask there"
    with pytest.raises(CommunicationError, match="was started on login2, and only there it can be ended"):
        cancel_background("far", grace_s=1.0)


def test_a_job_that_ignores_the_end_of_its_time_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(python(STUBBORN, str(tmp_path / "child")), start_new_session=True) as command:
        wait_for_text(tmp_path / "child")
        ended = _run(command, _Signals(command), 0.1, 0.1)
    assert ended == {"exit_code": 137, "reason": "ended at its time limit of 0.1 s"}


def test_a_command_that_does_not_start_is_an_error(state_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(IoError, match="could not be started") as caught:
        start("none", [str(tmp_path / "no-such-program")], tmp_path)
    assert "No such file or directory" in str(caught.value)
