"""What the doctor says about jobs that hang on purpose; `python -m benchmarks doctor` runs all of them everywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hang_matrix import HANGS, SCRIPT, run_hang

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param("native code", "gloo", marks=pytest.mark.matrix), ("loader waits", "shm")]
)
def test_a_hang_is_named_with_its_cause(tmp_path: Path, name: str, backend: str) -> None:
    hang = next(hang for hang in HANGS if hang.name == name)
    outcome = run_hang(hang, backend, 2, tmp_path, deadline_s=30.0, waits=False)
    assert outcome.is_right, (outcome.said, outcome.output)
    assert outcome.answer_s is not None
    assert outcome.answer_s < 15.0, "long before the deadline, on a busy machine too"
    assert outcome.said is not None
    assert any("in step" in line for line in outcome.said["stack"]), "of native code too"


@pytest.mark.matrix
@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.name)
def test_every_hang_is_named_on_torsh(tmp_path: Path, hang: object) -> None:
    outcome = run_hang(hang, "torsh", 4, tmp_path)  # type: ignore[arg-type]  # parametrize gives objects
    assert outcome.is_right, (outcome.said, outcome.output)


@pytest.mark.slow
def test_the_command_and_the_signal_ask_the_same_and_the_job_goes_on(tmp_path: Path) -> None:
    """A stopped rank; the doctor is asked by command and by SIGUSR1; after SIGCONT the job ends well."""
    (tmp_path / "train.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", "--rdzv-id", "hung-job"),
            *("train.py", "stopped", "shm", "60"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        while not process.stdout.readline().startswith("[rank 1] hang"):
            assert process.poll() is None
        notice = process.stdout.readline()
        assert "for rank 1: it does not answer: it is stopped" in notice
        torsh = [sys.executable, "-m", "torsh_distributed.cli.app"]
        listed = subprocess.run([*torsh, "doctor", "--job", "all"], capture_output=True, text=True, check=True)
        assert "hung-job" in listed.stdout
        asked = subprocess.run([*torsh, "doctor", "--job", "hung-job", "--json"], capture_output=True, text=True)
        assert asked.returncode == 3, asked.stderr
        said = json.loads(asked.stdout)
        assert (said["rank"], said["cause"]["kind"], said["sequence"]) == (1, "stopped", 9)
        process.send_signal(signal.SIGUSR1)
        line = ""
        while "Likely cause: its process is stopped" not in line:
            line = process.stdout.readline()
            assert line, "the launcher ended"
        pid = int(re.search(r"kill -CONT (\d+)", line).group(1))  # type: ignore[union-attr]  # it is there
        os.kill(pid, signal.SIGCONT)
        assert process.wait(timeout=30) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.wait()


SILENT = """
import os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
print("begun", flush=True)
if dist.get_rank() == 1:
    time.sleep(1.5)  # some beats
    os.kill(os.getpid(), signal.SIGSTOP)
while not os.path.exists("go"):
    time.sleep(0.05)
"""


@pytest.mark.matrix
@pytest.mark.slow
def test_a_rank_that_stops_beating_is_told_before_anybody_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SILENT)
    process = subprocess.Popen(
        [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = ""
        while "rank 1 gives no sign of life" not in line:
            line = process.stdout.readline()
            assert line, "the launcher ended"
        assert "stopped" in line
        while "kill -CONT" not in line:
            line = process.stdout.readline()
            assert line, "the launcher ended"
        (tmp_path / "go").touch()
        os.kill(int(re.search(r"kill -CONT (\d+)", line).group(1)), signal.SIGCONT)  # type: ignore[union-attr]
        assert process.wait(timeout=30) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.wait()
