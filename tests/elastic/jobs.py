"""Elastic jobs for tests: `torsh run --elastic` on `training_script`, with faults, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.elastic.training_script import NUM_STEPS, build
from torsh_distributed.elastic.faults.fault import faults_environment

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training_script.py")


@dataclass(frozen=True)
class ElasticOutcome:
    """How a job ended and what its workers recorded."""

    code: int
    output: str
    folder: Path
    seconds: float

    def steps(self, member: int) -> list[dict[str, Any]]:
        """What a worker recorded, step by step."""
        path = self.folder / f"steps-{member}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def computed(self, member: int) -> dict[int, list[int]]:
        """The samples that a worker has computed for each step, in all its forward passes."""
        found: dict[int, list[int]] = {}
        for line in (self.folder / f"computed-{member}.jsonl").read_text().splitlines():
            record = json.loads(line)
            found.setdefault(record["step"], []).extend(record["samples"])
        return found

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """The final weights of every worker that came to the end."""
        return {
            int(path.stem.partition("-")[2]): torch.load(path, weights_only=True)
            for path in self.folder.glob("weights-*.pt")
        }

    def losses(self) -> dict[int, float]:
        """The loss of every step; raises if two workers saw different ones."""
        found: dict[int, float] = {}
        for path in self.folder.glob("steps-*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                seen = found.setdefault(record["step"], record["loss"])
                assert seen == record["loss"], f"step {record['step']} has two losses"
        return found


def start_job(
    folder: Path,
    *options: str,
    faults: tuple[str, ...] = (),
    num_workers: int = 3,
    num_steps: int = NUM_STEPS,
    backend: str = "torsh",
    checkpoints: bool = False,
    env: dict[str, str] | None = None,
    script: Path = SCRIPT,
) -> subprocess.Popen[str]:
    """Start `torsh run --elastic` on the training script."""
    command = [sys.executable, "-m", "torsh_distributed.run", "--elastic", "--nproc-per-node", str(num_workers)]
    arguments = [str(folder), str(num_steps), backend]
    if checkpoints:
        arguments.append(str(folder / "checkpoints"))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*command, *options, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": path, **faults_environment(*faults), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_job(
    folder: Path,
    *options: str,
    meanwhile: Callable[[Path], None] | None = None,
    is_slow: bool = False,
    timeout_s: float = 60.0,
    **settings: Any,
) -> ElasticOutcome:
    """Run a job to its end; `meanwhile` acts on it from outside, and `is_slow` makes steps last until it has."""
    started_s = time.monotonic()
    if is_slow:
        (folder / "slow").touch()
    process = start_job(folder, *options, **settings)
    try:
        if meanwhile is not None:
            meanwhile(folder)
        (folder / "slow").unlink(missing_ok=True)
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return ElasticOutcome(process.returncode, output, folder, time.monotonic() - started_s)


def wait_for_joined(folder: Path, *, member: int, within_s: float = 100.0) -> None:
    """Wait until a worker that was started later has done a step."""
    deadline = time.monotonic() + within_s
    while not any(folder.glob(f"rank-{member}-step-*")):
        assert time.monotonic() < deadline, f"worker {member} did not join"
        time.sleep(0.01)


def wait_for_fault(log: Path, text: str, *, within_s: float = 60.0) -> int:
    """Wait until a fault has happened that contains `text`; the process that it happened to."""
    deadline = time.monotonic() + within_s
    while True:
        for line in log.read_text().splitlines() if log.exists() else ():
            if text in line and line.endswith("}"):
                return int(json.loads(line)["pid"])
        assert time.monotonic() < deadline, f"no fault {text!r}"
        time.sleep(0.01)


def wait_for_spare(launcher: int, *, within_s: float = 60.0) -> int:
    """The process id of a launcher's warm spare, once it has one."""
    deadline = time.monotonic() + within_s
    while True:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            if b"worker/spare.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        assert time.monotonic() < deadline, "there is no spare"
        time.sleep(0.01)


def undisturbed(num_steps: int = NUM_STEPS, *, width: int = 64) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and final weights of one process that trains on the same batches alone."""
    from torsh_distributed.train.batches import DataOrder, sharded

    model, optimizer, loader = build(width)
    losses: list[float] = []
    epoch = 0
    while len(losses) < num_steps:
        for piece in sharded(loader, DataOrder(seed=0, epoch=epoch), part=0, num_parts=1):
            if len(losses) == num_steps:
                break
            inputs, targets = piece.batch
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        epoch += 1
    return losses, model.state_dict()
