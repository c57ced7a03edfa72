"""The examples for other trainers run as they are, on our backend: all of them in ranks that have their libraries
imported already, and in the long form under both launchers."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.bed.heavy_imports import LIGHTNING, TRANSFORMERS
from tests.bed.world import ROOT, World

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
IMPORTS = {
    "hf_trainer": (*TRANSFORMERS, "transformers.trainer", "accelerate"),
    "accelerate_script": ("accelerate",),
    "lightning_trainer": LIGHTNING,
    "lightning_fabric": LIGHTNING,
    "torchvision_resnet": ("torchvision",),
}
SHORT = ("torch_ddp", "torsh")
QUICK = ("torch_ddp", "accelerate_script", "torch_fsdp2")
LINE = re.compile(r"loss (\d+\.\d+) on (\S+)")


def losses_in(output: str) -> list[float]:
    """The losses that a script prints; each with the backend, which must be ours."""
    found = LINE.findall(output)
    assert found, output
    assert {backend for _, backend in found} <= {"torsh", "cpu:torsh"}, found
    return [float(loss) for loss, _ in found]


def run(script: Path, launcher: str) -> list[float]:
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(script)], capture_output=True, text=True, timeout=110, cwd=script.parent
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return losses_in(done.stdout)


def as_main(script: Path) -> None:
    """What a launcher starts, with the variables that torchrun sets."""
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()


def needs(script: Path) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.needs_library(name) for name in LIBRARIES.get(script.stem, [])]
    return [*marks, pytest.mark.needs_torchvision] if script.stem.startswith("torchvision") else marks


SCRIPTS = sorted(FOLDER.glob("*.py"))


def cases() -> list[object]:
    return [
        pytest.param(
            script,
            launcher,
            marks=[*needs(script), *([] if (script.stem, launcher) == SHORT else [pytest.mark.matrix])],
            id=f"{script.stem}-{launcher}",
        )
        for script in SCRIPTS
        for launcher in LAUNCHERS
    ]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            script,
            marks=[*needs(script), *([] if script.stem in QUICK else [pytest.mark.matrix])],
            id=script.stem,
        )
        for script in SCRIPTS
    ],
)
def test_every_example_trains_on_our_backend(world: World, script: Path) -> None:
    imports = IMPORTS.get(script.stem, ())
    outcomes = world.outcomes(as_main, script, backend=None, timeout_s=60, imports=imports)
    for outcome in outcomes:
        assert outcome.is_ok, outcome.trace + outcome.output + outcome.stacks
    losses = losses_in(outcomes[0].output)
    assert len(losses) == 1 or losses[-1] < losses[0]


@pytest.mark.parametrize(("script", "launcher"), cases())
def test_an_example_runs_under_a_launcher(script: Path, launcher: str) -> None:
    losses = run(script, launcher)
    assert len(losses) == 1 or losses[-1] < losses[0]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["torch_ddp", "nanogpt"])
def test_both_launchers_give_the_same_losses(name: str) -> None:
    assert run(FOLDER / f"{name}.py", "torsh") == run(FOLDER / f"{name}.py", "torchrun")
