"""The examples for other trainers run as they are, under both launchers, on our backend, to the same losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.world import ROOT

pytestmark = pytest.mark.ranks

FOLDER = ROOT / "examples" / "trainers"
LIBRARIES = {
    "hf_trainer": ["transformers", "accelerate"],
    "accelerate_script": ["accelerate"],
    "lightning_trainer": ["lightning"],
    "lightning_fabric": ["lightning"],
}
LAUNCHERS = {
    "torsh": [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--nproc-per-node", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
SHORT = [
    ("hf_trainer", "torsh"),
    ("lightning_trainer", "torsh"),
    ("accelerate_script", "torchrun"),
    ("nanogpt", "torsh"),
]
LINE = re.compile(r"loss (\d+\.\d+) on (\S+)")


def run(script: Path, launcher: str) -> list[float]:
    """The losses that the script prints; each with the backend, which must be ours."""
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(script)], capture_output=True, text=True, timeout=110, cwd=script.parent
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = LINE.findall(done.stdout)
    assert found, done.stdout
    assert {backend for _, backend in found} <= {"torsh", "cpu:torsh"}, found
    return [float(loss) for loss, _ in found]


def cases() -> list[object]:
    out = []
    for script in sorted(FOLDER.glob("*.py")):
        for launcher in LAUNCHERS:
            marks = [pytest.mark.needs_library(name) for name in LIBRARIES.get(script.stem, [])]
            if script.stem.startswith("torchvision"):
                marks.append(pytest.mark.needs_torchvision)
            if (script.stem, launcher) not in SHORT:
                marks.append(pytest.mark.matrix)
            out.append(pytest.param(script, launcher, marks=marks, id=f"{script.stem}-{launcher}"))
    return out


@pytest.mark.parametrize(("script", "launcher"), cases())
def test_an_example_trains_on_our_backend(script: Path, launcher: str) -> None:
    losses = run(script, launcher)
    assert len(losses) == 1 or losses[-1] < losses[0]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["torch_ddp", "nanogpt"])
def test_both_launchers_give_the_same_losses(name: str) -> None:
    assert run(FOLDER / f"{name}.py", "torsh") == run(FOLDER / f"{name}.py", "torchrun")
