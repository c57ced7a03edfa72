"""The examples of remote calls do what they say."""

from __future__ import annotations

import functools
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.bed.world import World

EXAMPLES = Path(__file__).parents[2] / "examples" / "remote"
pytestmark = pytest.mark.ranks


def as_main(script: Path) -> None:
    """The processes that the script starts are forked, for each of them would import torch otherwise."""
    mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


def output_of(world: World, name: str) -> str:
    [outcome] = world.outcomes(as_main, EXAMPLES / name, num_ranks=1, backend=None, timeout_s=110)
    assert outcome.is_ok, outcome.trace + outcome.output + outcome.stacks
    return outcome.output


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


def test_observers_and_agent_run_by_torchs_names(world: World) -> None:
    """References to oneself, methods through references, functions as arguments, batches by `async_execution`."""
    check_observers(output_of(world, "torch_observers.py"))


@pytest.mark.matrix
def test_observers_and_agent_run_in_processes_that_are_spawned() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "torch_observers.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_observers(done.stdout)


def check_observers(output: str) -> None:
    lines = [line for line in output.splitlines() if line.startswith("in batches")]
    assert [line.split(":")[0] for line in lines] == ["in batches False", "in batches True"]
    first, last = (float(word) for word in (lines[0].split()[4], lines[1].split()[-1]))
    assert last > first, "the policy learns from what was sent"


def test_the_parameter_server_survives_kill_9_with_the_losses_of_training_without_it(world: World) -> None:
    output = output_of(world, "parameter_server.py")
    assert "step 11: the server was killed" in output
    assert "as without a server: True" in output


def test_rows_are_trained_and_publications_followed(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("embedding_rows.py", "follower.py"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    rows, *publications = capsys.readouterr().out.splitlines()
    first, last = rows.split("loss ")[1].split(" -> ")
    assert float(last) < float(first) - 0.1
    assert [line.split(":")[0] for line in publications[-1:]] == ["publication 3, version 60"]


@pytest.mark.needs_core
def test_processes_count_in_the_memory_of_one_that_is_stopped(world: World) -> None:
    assert "4 processes counted to 40000" in output_of(world, "counter.py")
