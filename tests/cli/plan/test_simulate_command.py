"""`torsh plan simulate`: what slow ranks and failures cost, and a step on a time axis."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.plan.commands import app

MODEL = "tests.planner.live_memory:char_gpt"
ARGS = ["simulate", MODEL, "--ranks", "16", "--machine", "h100", "--set", "training.batch_size=64"]


def shown(*args: str) -> str:
    result = CliRunner().invoke(app, [*ARGS, *args], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_step_of_unequal_ranks_is_told_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "step.png"
    told = shown("--spread", "0.05", "--slow", "0.1", "--png", str(png))
    assert "16 ranks on H100 SXM" in told
    assert "of the ranks' time waiting: averaging of gradients" in told
    for row in ("the slowest", "typical", "the fastest"):
        assert row in told
    assert "U update" in told
    assert "failures" not in told
    assert png.stat().st_size > 1000


def test_failures_are_drawn_beside_stragglers() -> None:
    told = shown("--mtbf", "20d", "--duration", "60d")
    # 16 ranks for 60 days, one failure in 20 days of each.
    assert "in 60d: 4" in told
    assert "one every 30.0 h" in told
    assert "of the time is progress" in told
    assert "rank 0, all alike" in told


def test_a_plan_that_would_not_run_is_said_to_be_none() -> None:
    large = shown("--set", "training.batch_size=4000000")
    assert "the plan does not fit" in large
    args = ["simulate", MODEL, "--ranks", "64", "--machine", "h100"]
    few = CliRunner().invoke(app, args, env={"COLUMNS": "150"}).output
    assert "a batch of 32 leaves 32 of 64 ranks without a sample" in few
    assert "does not fit" not in few
