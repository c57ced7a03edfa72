"""The examples of remote calls do what they say."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "remote"
pytestmark = pytest.mark.ranks


def test_the_tutorial_prints_what_one_process_would() -> None:
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "tutorial.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "maths: 5",
        "matrices: (300, 100) as here: True",
        "objects: 50",
        "streams: [1, 2, 4, 8, 16, 32, 64, 128]",
        "errors: ZeroDivisionError: division by zero True",
        f"concurrency: {sum(i + 1 for i in range(64))}",
    ):
        assert line in done.stdout


def test_observers_and_agent_run_by_torchs_names() -> None:
    """References to oneself, methods through references, functions as arguments, batches by `async_execution`."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "torch_observers.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("in batches")]
    assert [line.split(":")[0] for line in lines] == ["in batches False", "in batches True"]
    first, last = (float(word) for word in (lines[0].split()[4], lines[1].split()[-1]))
    assert last > first, "the policy learns from what was sent"


def test_the_parameter_server_survives_kill_9_with_the_losses_of_training_without_it() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "parameter_server.py")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 11: the server was killed" in done.stdout
    assert "as without a server: True" in done.stdout


def test_rows_are_trained_and_publications_followed(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("embedding_rows.py", "follower.py"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    rows, *publications = capsys.readouterr().out.splitlines()
    first, last = rows.split("loss ")[1].split(" -> ")
    assert float(last) < float(first) - 0.1
    assert [line.split(":")[0] for line in publications[-1:]] == ["publication 3, version 60"]


@pytest.mark.needs_core
def test_processes_count_in_the_memory_of_one_that_is_stopped() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "counter.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 processes counted to 40000" in done.stdout
