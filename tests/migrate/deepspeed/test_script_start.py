"""`deepspeed.initialize` as scripts call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, pathlib, sys, time
import torch
import deepspeed

folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    deadline = time.monotonic() + 60
    while not (folder / "there").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # the other rank is in `initialize` by now
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    (folder / "config.json").write_text(json.dumps(config))
else:
    (folder / "there").touch()
model, _, _, _ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=str(folder / "config.json"))
loss = model(torch.ones(2, 4)).square().mean()
model.backward(loss)
model.step()
print("stepped", model.global_steps)
"""


@pytest.mark.ranks
def test_a_config_that_one_rank_writes_is_read_once_all_have_met(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torsh_distributed.run", "--as", "deepspeed", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "train.py"), str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == ["stepped 1", "stepped 1"]
