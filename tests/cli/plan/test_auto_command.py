"""`torsh plan auto`: a table of the best, reasons for the rest, and a plan file that loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.planner.live_memory import char_gpt
from torsh_distributed.cli.plan.commands import app
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.step_text import samples_text, step_text

MODEL = "tests.planner.live_memory:char_gpt"


def test_the_plan_that_is_written_is_the_first_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    args = ["auto", MODEL, "--gpus", "4", "--machine", "h100", "--batch", "64", "-o", str(path), "--rejected"]
    shown = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "not measured: " in shown.output
    assert "--nproc-per-node 4 --plan" in shown.output
    assert "td.Plan.from_env()" in shown.output
    plan = Plan.load(path)
    plan.validate(4)
    assert plan.training.batch_size == 64
    first = next(line for line in shown.output.splitlines() if line.split()[:1] == ["1"])
    assert all(f"{axis} {degree}" in first for axis, degree in plan.resolve(4).mesh.degrees.items() if degree > 1)
    assert "a cell is rank·part of the batch" in shown.output


def test_the_numbers_are_whole_in_a_narrow_terminal() -> None:
    args = ["auto", MODEL, "--gpus", "8", "--machine", "h100", "--batch", "64"]
    shown = CliRunner().invoke(app, args, env={"COLUMNS": "80"})
    table = shown.output.partition(" plans tried")[0]
    assert "…" not in table
    assert "shard" in table
    assert " × tp 1" not in table


def test_without_a_batch_every_rank_gets_samples(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    args = ["auto", MODEL, "--gpus", "64", "--machine", "h100", "-o", str(path)]
    shown = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert "batch: from the memory left" in shown.output
    plan = Plan.load(path).resolve(64)
    assert plan.mesh.data_degree == 64, "not 32, for the 32 samples of a plan that says nothing"
    assert plan.training.batch_size >= 256
    assert Plan.auto(char_gpt(), world_size=64, machine="h100").mesh == Plan.load(path).mesh


def test_where_nothing_fits_the_nearest_is_named() -> None:
    args = ["auto", MODEL, "--gpus", "4", "--machine", "h100", "--memory", "1MB"]
    shown = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert shown.exit_code == 1
    assert "the nearest needs" in shown.output


def test_the_memory_of_a_gpu_on_a_machine_without_one_says_which_machines_to_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    args = ["auto", MODEL, "--gpus", "2", "--batch", "4", "--memory", "80GB"]
    shown = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert "times and order are those of its CPU; for GPUs: --machine h100" in shown.output
    named = CliRunner().invoke(app, [*args, "--machine", "h100"], env={"COLUMNS": "200"})
    assert "for GPUs: --machine" not in named.output


def test_long_steps_are_told_in_seconds() -> None:
    assert [step_text(one) for one in (0.0385, 9.9, 396.14)] == ["38.5 ms", "9,900.0 ms", "396.1 s"]
    assert [samples_text(one) for one in (815.21, 0.0831)] == ["815.2", "0.0831"]
