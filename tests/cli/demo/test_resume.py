"""`torsh demo gpt`, interrupted and resumed on other ranks and other axes: the losses of the undisturbed run."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.matrix]

TRAINING = "[training]\nsteps = 40\nbatch_size = 16\nlearning_rate = 2e-3\nlog_every = 4\n"


def start(folder: Path, out: str, mesh: str, num_ranks: int) -> subprocess.Popen[str]:
    plan = folder / f"{out}.toml"
    plan.write_text(f"[mesh]\n{mesh}\n{TRAINING}")
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "demo", "gpt", "--plan", str(plan)]
    command += ["--nproc-per-node", str(num_ranks), "--out", str(folder / out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)


def losses(text: str) -> dict[int, float]:
    found = re.findall(r"step\s+(\d+)/40.*loss\s+([\d.]+)", text)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.timeout(600)
def test_an_interrupted_demo_goes_on_on_any_ranks(tmp_path: Path) -> None:
    whole = losses(start(tmp_path, "whole", "shard = 2", 2).communicate(timeout=110)[0])
    assert sorted(whole)[-1] == 40
    job = start(tmp_path, "cut", "shard = 2", 2)
    while not (tmp_path / "cut" / "checkpoints" / "step-00000016").exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=60)
    for name, mesh, num_ranks in (("one", "dp = 1", 1), ("two", "tp = 2", 2), ("four", "tp = 2\npp = 2", 4)):
        shutil.copytree(tmp_path / "cut", tmp_path / name)
        text = start(tmp_path, name, mesh, num_ranks).communicate(timeout=110)[0]
        assert "resuming at step" in text
        found = losses(text)
        assert sorted(found)[-1] == 40
        assert found == pytest.approx({step: whole[step] for step in found}, abs=2e-3)
