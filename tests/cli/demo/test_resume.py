"""`torsh demo gpt`, ended in every way and resumed on other ranks and other axes: the losses of the undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.bed.world import World
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, is_written_to
from torsh_distributed.checkpoint.files.manifest import read_manifest
from torsh_distributed.plan import Plan, TrainingConfig

pytestmark = pytest.mark.ranks

TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point"]


def start(folder: Path, out: str, mesh: str, num_ranks: int, steps: int, section: str = "") -> subprocess.Popen[str]:
    training = f"[training]\nsteps = {steps}\nbatch_size = 16\nlearning_rate = 2e-3\nlog_every = 1\n"
    plan = folder / f"{out}.toml"
    plan.write_text(f"[mesh]\n{mesh}\n{training}{section}")
    command = [*TORSH, "demo", "gpt", "--plan", str(plan), "--nproc-per-node", str(num_ranks)]
    command += ["--out", str(folder / out)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, start_new_session=True
    )


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step\s+(\d+)/\d+.*?loss\s+([\d.]+)", text)}


def finished(job: subprocess.Popen[str], steps: int) -> dict[int, float]:
    text = job.communicate(timeout=150)[0]
    assert job.returncode == 0, text
    found = losses(text)
    assert max(found) == steps
    return found


def wait_until(condition: Callable[[], object], job: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert job is None or job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(job: subprocess.Popen[str], how: str) -> int:
    """End a job as told, and wait until none of its processes can write any more; returns its exit code."""
    if how == "kill a worker":
        started = psutil.Process(job.pid).children(recursive=True)
        next(one for one in started if "cli.demo.worker" in str(one.cmdline())).kill()
    elif how == "SIGINT":
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
    else:
        job.send_signal(signal.Signals[how])
    job.communicate(timeout=100)
    return job.returncode


def cut(folder: Path, name: str, how: str, steps: int, at: int) -> tuple[Path, int]:
    """A job on two ranks with sharding that is ended once step `at` is saved; its checkpoints and its exit code."""
    job = start(folder, name, "shard = 2", 2, steps)
    checkpoints = folder / name / "checkpoints"
    wait_until((checkpoints / f"step-{at:08d}").exists, job)
    code = end(job, how)
    wait_until(lambda: not is_written_to(CheckpointDirectory(checkpoints)))
    return checkpoints, code


def train_alone(steps: int) -> dict[int, float]:
    from torsh_distributed.train import parallelize
    from torsh_distributed.train.demos import DEMOS

    plan = Plan(training=TrainingConfig(steps=steps, batch_size=16, learning_rate=2e-3))
    demo = DEMOS["gpt"](plan)
    engine = parallelize(demo.model, demo.optimizer, plan, loss_fn=demo.loss_fn)
    return {number: engine.step(batch) for number, batch in enumerate(engine.batches(demo.loader), 1)}


@pytest.mark.matrix
def test_a_job_whose_launcher_is_killed_goes_on_with_tensor_parallelism(world: World, tmp_path: Path) -> None:
    _, code = cut(tmp_path, "cut", "SIGKILL", steps=8, at=3)
    assert code == -signal.SIGKILL
    found = finished(start(tmp_path, "cut", "tp = 2", 2, 8), 8)
    expected = world.run(train_alone, 8, num_ranks=1)[0]
    assert 3 < min(found) <= 8
    assert found == pytest.approx({step: expected[step] for step in found}, abs=2e-3)


RESUMED = (
    ("one", "dp = 1", 1),
    ("dp", "dp = 2", 2),
    ("tp", "tp = 2", 2),
    ("pp", "pp = 2", 2),
    ("same", "shard = 2", 2),
)
ON_FOUR = (
    ("dp-4", "dp = 4", 4),
    ("tp-pp", "tp = 2\npp = 2", 4),
    ("dp-tp", "dp = 2\ntp = 2", 4),
    ("shard-pp", "shard = 2\npp = 2", 4),
)
CODES = {"SIGINT": 130, "SIGTERM": 75, "SIGUSR1": 75, "SIGKILL": -9, "kill a worker": 137}


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", CODES)
def test_a_job_ended_in_any_way_goes_on_on_any_ranks(tmp_path: Path, how: str) -> None:
    steps = 40
    whole = finished(start(tmp_path, "whole", "shard = 2", 2, steps), steps)
    checkpoints, code = cut(tmp_path, "cut", how, steps=steps, at=16)
    assert code == CODES[how]
    newest = CheckpointDirectory(checkpoints).complete_steps()[0]
    reason = read_manifest(CheckpointDirectory(checkpoints).step_path(newest)).metadata.reason
    assert (reason == "signal") == (how in ("SIGINT", "SIGTERM", "SIGUSR1"))
    for name, mesh, num_ranks in RESUMED + (ON_FOUR if how in ("SIGINT", "SIGKILL") else ()):
        shutil.copytree(tmp_path / "cut", tmp_path / name)
        found = finished(start(tmp_path, name, mesh, num_ranks, steps), steps)
        assert min(found) == newest + 1
        assert found == pytest.approx({step: whole[step] for step in found}, abs=0 if name == "same" else 2e-3)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_now_makes_a_running_job_save(tmp_path: Path) -> None:
    checkpoints = tmp_path / "here"
    section = f'[checkpoint]\nenabled = true\ndir = "{checkpoints}"\nevery_steps = 1000000\n'
    job = start(tmp_path, "job", "shard = 2", 2, 4000, section)
    try:
        wait_until(lambda: is_written_to(CheckpointDirectory(checkpoints)), job)
        subprocess.run([*TORSH, "checkpoint", "now", str(checkpoints)], check=True, timeout=60)
        directory = CheckpointDirectory(checkpoints)
        wait_until(directory.complete_steps, job)
        newest = directory.complete_steps()[0]
        assert read_manifest(directory.step_path(newest)).metadata.reason == "request"
    finally:
        job.kill()
        job.communicate()
