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


GPT, PIPELINE = FOLDER / "deepspeed_gpt.py", FOLDER / "deepspeed_pipeline.py"
STEPS = ("-p", "2", "--steps", "12")
IN_TURN = """
import runpy, sys
given = [word for word in sys.argv if word.startswith("--local_rank")]
for script, *words in {lines!r}:
    sys.argv = [script, *given, *words]
    runpy.run_path(script, run_name="__main__")
"""


def _options(folder: Path, epochs: int = 3) -> tuple[str, ...]:
    config = ("--deepspeed_config", str(FOLDER / "ds_zero3.json"), "--save-dir", str(folder))
    return ("--epochs", str(epochs), *config)


def _check_gpt(out: str, folder: Path) -> None:
    losses = [float(one) for one in re.findall(r"epoch \d+: .* loss ([\d.]+)", out)]
    assert len(losses) == 3, out
    assert losses[-1] < 0.9 * losses[0], out
    assert "the head is (32, 32) in torch.bfloat16" in out
    assert "rank 0 of 2 is done, local_rank 0" in out
    assert "rank 1 of 2 is done, local_rank 1" in out
    assert (folder / "latest").read_text() == "global_step9"


def _check_pipeline(out: str) -> None:
    found = re.findall(r"stage (\d) of 2: loss ([\d.]+) to ([\d.]+), evaluated ([\d.]+), step 12", out)
    assert sorted(stage for stage, *_ in found) == ["0", "1"], out
    for _, first, last, evaluated in found:
        assert float(last) < 0.7 * float(first), out
        assert float(evaluated) < float(first), out


def test_a_gpt_with_zero_3_and_a_pipeline_with_tied_layers_train(tmp_path: Path) -> None:
    """Both scripts, unchanged, one after the other in one job: starting interpreters takes most of the time."""
    lines = [(str(GPT), *_options(tmp_path)), (str(PIPELINE), *STEPS)]
    script = tmp_path / "in_turn.py"
    script.write_text(IN_TURN.format(lines=lines))
    out = run("--num_gpus", "2", "--master_port=0", str(script))
    _check_gpt(out, tmp_path)
    _check_pipeline(out)


@pytest.mark.matrix
def test_a_gpt_trains_and_resumes_with_zero_3(tmp_path: Path) -> None:
    _check_gpt(run("--num_gpus", "2", "--master_port=0", str(GPT), *_options(tmp_path)), tmp_path)
    more = run("--num_gpus", "2", str(GPT), *_options(tmp_path, 4), "--resume")
    assert re.search(r"epoch 3: step 12, loss", more), more


@pytest.mark.matrix
def test_a_pipeline_with_tied_layers_trains() -> None:
    _check_pipeline(run("--num_gpus=2", str(PIPELINE), *STEPS))
