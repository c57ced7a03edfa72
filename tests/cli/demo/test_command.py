"""`torsh demo`: two real workers, a falling loss, a summary and a picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.test_app import torsh
from torsh_distributed.plan import Plan

pytestmark = pytest.mark.ranks


@pytest.mark.matrix
def test_the_mlp_demo_learns_and_leaves_a_curve(tmp_path: Path) -> None:
    done = torsh("demo", "mlp", "--steps", "60", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss +([0-9.]+) ", done.stdout)]
    assert len(losses) >= 7
    assert losses[-1] < 0.6 * losses[0]
    assert "2 ranks on" in done.stdout
    assert re.search(r"communicating +│ [0-9.]+% of the time", done.stdout)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
def test_a_plan_file_replaces_the_demos_numbers(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    # A pipeline by measured time: the demo gives its first inputs to measure on.
    pipeline = '[mesh]\ndp = 1\npp = 2\n[pipeline]\nnum_microbatches = 2\nbalance = "time"\n'
    training = "[training]\nsteps = 3\nbatch_size = 8\nlog_every = 1\ngradient_accumulation = 2\n"
    plan.write_text(pipeline + training)
    done = torsh("demo", "gpt", "--plan", str(plan), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "batch 8" in done.stdout
    assert "step     3/3" in done.stdout
    assert "communicating" not in done.stdout, "a pipeline has no gradients on their way: nothing is measured"


@pytest.mark.matrix
def test_the_demo_with_experts_trains_with_them_spread_over_two_ranks(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    training = "[training]\nsteps = 3\nbatch_size = 8\nlog_every = 1\n"
    plan.write_text(f'[mesh]\nep = 2\n[expert]\nnum_experts = 4\noverflow = "none"\n{training}')
    done = torsh("demo", "moe", "--plan", str(plan), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "4 experts in each of 3 layers" in done.stdout
    assert "step     3/3" in done.stdout
    assert "Shall I" in done.stdout, "text is made by both ranks together"


def test_a_plan_that_does_not_fit_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\ndp = 3\n")
    done = torsh("demo", "--plan", str(plan))
    assert done.returncode == 1
    assert "dp 3 × tp 1 × pp 1 = 3, but the world has 2 ranks" in done.stderr


@pytest.mark.matrix
def test_the_planner_chooses_the_demos_plan_and_its_joules_are_told(tmp_path: Path) -> None:
    done = torsh("demo", "gpt", "--plan", "auto", "--steps", "3", "--green", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"energy: [0-9.]+ k?J \(.*(measured|estimated).*\) in .* a sample; .* a step", done.stderr)
    assert '"joules_per_sample": ' in (tmp_path / "report.html").read_text()
    assert "planned for this machine: " in done.stdout
    plan = Plan.load(tmp_path / "plan.toml")
    plan.validate(2)
    assert plan.training.batch_size == 32
    assert "2 ranks" in done.stdout


@pytest.mark.matrix
def test_the_report_says_where_the_time_went(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\ntp = 2\n[training]\nsteps = 3\nbatch_size = 4\n")
    done = torsh("demo", "gpt", "--plan", str(plan), "--report", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"ms a step, parallel efficiency [0-9]+% \(dp 1 × tp 2 × pp 1 = 2, 2 steps\)", done.stdout)
    assert re.search(
        r"waiting for tp +│ +[0-9.]+ │ +[0-9.]+% │ +[0-9.]+ │ +[0-9.]+ │ +[0-9.]+ ms on rank [01]", done.stdout
    )
