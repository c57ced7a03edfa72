"""The commands of README on a machine with GPUs: they train on them to the end, and say if ranks share one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.test_app import torsh

pytestmark = [pytest.mark.ranks, pytest.mark.needs_cuda]

SCRIPT = Path(__file__).parents[3] / "examples" / "train.py"
SHARED = "ranks share GPUs: "


@pytest.mark.parametrize("name", ["gpt", "mlp", "moe"])
def test_a_demo_trains_on_every_gpu_and_shows_what_it_learned(name: str, tmp_path: Path) -> None:
    num_gpus = torch.cuda.device_count()
    done = torsh("demo", name, "--steps", "12", "--nproc-per-node", str(num_gpus), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{num_gpus} ranks on cpu:gloo,cuda:nccl" in done.stdout
    assert "the trained model says:" in done.stdout
    assert SHARED not in done.stdout + done.stderr


def test_a_demo_with_more_ranks_than_gpus_shares_them_and_says_so_in_one_line(tmp_path: Path) -> None:
    num_ranks = torch.cuda.device_count() + 1
    done = torsh("demo", "mlp", "--steps", "12", "--nproc-per-node", str(num_ranks), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{num_ranks} ranks on torsh" in done.stdout
    assert (done.stdout + done.stderr).count(SHARED) == 1


@pytest.mark.parametrize("more", [0, 1])
def test_the_script_of_readme_does_the_same(more: int) -> None:
    num_ranks = torch.cuda.device_count() + more
    done = torsh("run", "--nproc-per-node", str(num_ranks), str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert "step 200: loss" in done.stdout
    assert (done.stdout + done.stderr).count(SHARED) == more


def test_workers_share_the_first_gpu_where_they_are_told_to() -> None:
    done = torsh("run", "--nproc-per-node", "2", "--share-gpu", str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert "step 200: loss" in done.stdout
    assert (done.stdout + done.stderr).count("2 ranks and 1 visible GPU") == 1
