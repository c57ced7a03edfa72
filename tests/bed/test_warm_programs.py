"""A forked program must be to its test, and to what it starts itself, what a started one is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.warm_programs import NURSERY, Started

TELL = """
import os, sys
print(os.getcwd(), sys.argv[1:], os.environ.get("SAID"), flush=True)
print("of errors", file=sys.stderr)
sys.exit(7)
"""


def torsh(*words: str) -> list[str]:
    return [sys.executable, "-m", "torsh_distributed.cli.entry_point", *words]


def run_as(kind: type, folder: Path, env: dict[str, str], *words: str) -> tuple[int, str, str]:
    with kind(torsh(*words), cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_job_says_and_returns_what_a_started_one_does(tmp_path: Path, method: str) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    env = {**os.environ, "SAID": "by the environment"}
    words = ("run", "--nproc-per-node", "1", "--start-method", method, "tell.py", "--own", "word")
    code, output, errors = run_as(subprocess.Popen, tmp_path, env, *words)
    started_code, started_output, _ = run_as(Started, tmp_path, env, *words)
    assert (code, output) == (started_code, started_output)
    assert f"{tmp_path} ['--own', 'word'] by the environment" in output
    assert "of errors" in output + errors


@pytest.mark.slow
def test_a_wrong_command_is_answered_as_by_a_started_one(tmp_path: Path) -> None:
    found, started = (run_as(kind, tmp_path, dict(os.environ), "no-such") for kind in (subprocess.Popen, Started))
    assert found == started
    assert found[0] != 0


@pytest.mark.slow
def test_it_is_a_child_of_the_nursery_and_takes_signals_and_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_module.py").write_text("NAME = 'found on PYTHONPATH'")
    (tmp_path / "wait.py").write_text(
        "import own_module, signal; print(own_module.NAME, flush=True); signal.pause(); print('resumed')"
    )
    process = subprocess.Popen(
        torsh("run", "--nproc-per-node", "1", "wait.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "modules")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process:
        assert any("found on PYTHONPATH" in line for line in process.stdout)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        keeper = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[1])
        assert NURSERY.process is not None
        assert int(Path(f"/proc/{keeper}/stat").read_text().rsplit(")")[1].split()[1]) == NURSERY.process.pid
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=20) == -signal.SIGKILL


@pytest.mark.slow
def test_libraries_in_a_folder_of_the_jobs_own_need_no_interpreter(tmp_path: Path) -> None:
    """`take_environment` loads them; jobs with a stand-in for a driver have such a folder."""
    with subprocess.Popen(
        torsh("--help"), env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, stdout=subprocess.PIPE
    ) as process:
        parent = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[1])
        process.communicate(timeout=60)
    assert parent != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_variables_that_are_read_while_libraries_load_start_an_interpreter(name: str) -> None:
    with subprocess.Popen(
        torsh("--help"), env={**os.environ, name: "3"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        parent = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[1])
        process.communicate(timeout=60)
    assert parent == os.getpid()
