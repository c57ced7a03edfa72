"""Workers that are forked from a process that has imported torch, from the first one on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bed.warm_programs import Started
from tests.bed.world import World
from tests.launch.jobs import launch, write_script

pytestmark = pytest.mark.ranks

TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point"]

PLAIN_LOOP = """\
import torch
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(5):
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_first_workers_have_torch_their_own_places_and_exit_codes_and_are_recorded(
    world: World, tmp_path: Path
) -> None:
    script = write_script(
        tmp_path,
        """
        print("torch" in sys.modules, os.getsid(0) == os.getpid(), os.environ["LOCAL_RANK"])
        assert str(launcher) == open(os.path.join(folder, "launcher-0")).read(), "not the launcher's child"
        leave(f"here-{rank}")
        wait_for("here-0", "here-1")
        """,
        PLAIN_LOOP,
        "sys.exit(3 * rank)\n",
    )
    (outcome,) = launch(world, script, forks_workers=True, env={"TORSH_EVENTS_DIR": str(tmp_path / "events")})
    assert "[rank 0] True True 0" in outcome.output
    assert "[rank 1] True True 1" in outcome.output
    assert outcome.value == 3, outcome.output
    check_recorded(tmp_path / "events")


def check_recorded(folder: Path) -> None:
    """The steps of a script that says nothing about them itself."""
    for rank in range(2):
        (recorded,) = folder.glob(f"*rank*{rank}*.jsonl")
        assert recorded.read_text().count('"type": "step"') == 5, recorded.read_text()


def test_a_job_that_is_interrupted_while_torch_is_imported_ends_quietly(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("print('started')")
    command = [*TORSH, "run", "--nproc-per-node", "2", "--start-method", "forkserver", str(script)]
    with Started(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        wait_for_spare(job.pid)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT, output
    assert "SIGINT: the job ends" in output
    assert "started" not in output
    assert "Traceback" not in output


def wait_for_spare(launcher: int) -> None:
    """Until the launcher has begun to import torch in the process that workers are forked from."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        if any(b"spare.py" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children):
            return
        time.sleep(0.005)
    raise AssertionError("the launcher starts no spare")


def test_a_script_that_knows_only_torch_is_recorded_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(PLAIN_LOOP)
    subprocess.run(
        [*TORSH, "run", "--nproc-per-node", "2", "--start-method", "spawn", str(script)],
        env={**os.environ, "TORSH_EVENTS_DIR": str(tmp_path / "events")},
        check=True,
        timeout=100,
    )
    check_recorded(tmp_path / "events")
