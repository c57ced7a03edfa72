"""Scripts in DeepSpeed's own style run unchanged under `torsh run --as deepspeed`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.world import ROOT

pytestmark = pytest.mark.ranks

FOLDER = ROOT / "examples" / "migrate"
TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--as", "deepspeed"]


def run(*words: str) -> str:
    done = subprocess.run([*TORSH, *words], capture_output=True, text=True, timeout=110, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _train(folder: Path) -> tuple[str, ...]:
    config = ("--deepspeed_config", str(FOLDER / "ds_zero3.json"), "--save-dir", str(folder))
    out = run("--num_gpus", "2", "--master_port=0", str(FOLDER / "deepspeed_gpt.py"), "--epochs", "3", *config)
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3
    assert losses[-1] < 0.9 * losses[0], out
    assert "the head is (32, 32) in torch.bfloat16" in out
    assert "rank 0 of 2 is done, local_rank 0" in out
    assert "rank 1 of 2 is done, local_rank 1" in out
    assert (folder / "latest").read_text() == "global_step9"
    return config


def test_a_gpt_trains_with_zero_3(tmp_path: Path) -> None:
    _train(tmp_path)


@pytest.mark.matrix
def test_a_gpt_resumes_with_zero_3(tmp_path: Path) -> None:
    config = _train(tmp_path)
    more = run("--num_gpus", "2", str(FOLDER / "deepspeed_gpt.py"), "--epochs", "4", "--resume", *config)
    assert re.search(r"epoch 3: step 12, loss", more), more


def test_a_pipeline_with_tied_layers_trains() -> None:
    out = run("--num_gpus=2", str(FOLDER / "deepspeed_pipeline.py"), "-p", "2", "--steps", "12")
    found = re.findall(r"stage (\d) of 2: loss ([\d.]+) to ([\d.]+), evaluated ([\d.]+), step 12", out)
    assert sorted(stage for stage, *_ in found) == ["0", "1"], out
    for _, first, last, evaluated in found:
        assert float(last) < 0.7 * float(first), out
        assert float(evaluated) < float(first), out
