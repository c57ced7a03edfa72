"""Scripts in the style of other libraries' examples run unchanged under `torsh run --as LIBRARY`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bed.world import ROOT

pytestmark = pytest.mark.ranks

FOLDER = ROOT / "examples" / "migrate"
TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--as"]


def run(*words: str, library: str = "horovod", timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TORSH, library, *words], capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.matrix
def test_the_digits_are_learned_and_the_timeline_is_there(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    done = run(
        "-np",
        "2",
        "-H",
        "localhost:2",
        "--timeline-filename",
        str(timeline),
        "python",
        str(FOLDER / "horovod_digits.py"),
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"Accuracy: ([\d.]+)%", done.stdout)]
    assert accuracies[-1] > 90, done.stdout
    names = {event["name"] for event in json.loads(timeline.read_text())}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "BROADCAST"} <= names


@pytest.mark.matrix
@pytest.mark.parametrize("option", ["--fp16-allreduce", "--use-adasum", "--gradient-predivide-factor=2"])
def test_the_options_of_the_script_work(option: str) -> None:
    done = run("-np", "2", "python", str(FOLDER / "horovod_digits.py"), "--epochs", "3", option)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"Accuracy: ([\d.]+)%", done.stdout)[-1]) > 90, done.stdout


@pytest.mark.matrix
def test_an_elastic_script_continues_from_its_commit_after_a_crash(tmp_path: Path) -> None:
    script = str(FOLDER / "horovod_elastic.py")
    done = run("-np", "2", "--reset-limit", "2", "python", script, "--crash-marker", str(tmp_path / "crashed"))
    assert done.returncode == 0, done.stderr
    starts = re.findall(r"training from epoch (\d+), batch (\d+), (\d+) steps", done.stdout)
    assert starts == [("0", "0", "0"), ("1", "4", "12")], done.stdout
    finish = re.search(r"finished after (\d+) steps with loss ([\d.]+)", done.stdout)
    assert finish is not None, done.stdout
    assert float(finish[2]) < 0.5


def test_an_elastic_script_goes_on_in_place_and_takes_a_new_worker_in(tmp_path: Path) -> None:
    script = str(FOLDER / "horovod_elastic.py")
    line = ["-np", "2", "--min-np", "1", "--max-np", "2", "python", script, "--crash-marker", str(tmp_path / "crashed")]
    done = run(*line, "--epochs", "6", "--wait-for", "2")
    assert done.returncode == 0, done.stderr
    starts = re.findall(r"training from epoch (\d+), batch (\d+), (\d+) steps so far, (\d+) ranks", done.stdout)
    assert starts[0] == ("0", "0", "0", "2"), done.stdout
    assert starts[1] == ("1", "4", "12", "1"), done.stdout  # the survivor, from the commit before the crash
    assert starts[2][3] == "2", done.stdout  # with the new worker
    finish = re.search(r"finished after (\d+) steps with loss ([\d.]+)", done.stdout)
    assert finish is not None, done.stdout
    assert float(finish[2]) < 0.5


@pytest.mark.matrix
def test_a_resnet_with_oss_and_sharded_ddp_learns_its_shapes(tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    script = str(FOLDER / "fairscale_resnet.py")
    done = run("--nproc-per-node", "2", script, "--save", str(saved), library="fairscale")
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", done.stdout)]
    assert accuracies[-1] > 90, done.stdout
    state = torch.load(saved, weights_only=True)
    assert len(state["optimizer"]["state"]) == len(state["optimizer"]["param_groups"][0]["params"])
    assert "layer1.conv1.weight" in state["model"]


@pytest.mark.matrix
@pytest.mark.timeout(300)  # half precision on a CPU: more than a minute on two idle cores
def test_the_resnet_with_recomputed_activations_and_scaled_losses(tmp_path: Path) -> None:
    script = str(FOLDER / "fairscale_resnet.py")
    done = run("--nproc-per-node", "2", script, "--amp", "--checkpoint_activations", library="fairscale", timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"accuracy ([\d.]+)%", done.stdout)[-1]) > 90, done.stdout
