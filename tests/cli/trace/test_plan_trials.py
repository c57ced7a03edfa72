"""`torsh tune RUN --model …`: the slower half of the plans is given up after each round, and the best one is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.trace.plan_trials import AS_IT_WAS, Tuned, halve, keep, recorded_plan, with_plan
from torsh_distributed.cli.trace.tune_command import app
from torsh_distributed.errors import ConfigurationError, ProcessFailure
from torsh_distributed.plan import Plan


def tried(times_s: dict[str, float], *, failing: str = "", rounds: int = 2) -> tuple[Tuned, list[str]]:
    """Halving of plans that take these times, and the order of the runs."""
    order: list[str] = []

    def trial(name: str, number: int) -> list[float]:
        order.append(name)
        if name == failing:
            raise ProcessFailure("the job failed with exit code 1", hint="out of memory")
        return [times_s[name] + 0.001 * ((len(order) + place) % 3) for place in range(5)]

    return halve([name for name in times_s if name != AS_IT_WAS], trial, rounds=rounds, tell=order.append), order


TIMES = {AS_IT_WAS: 1.0, "a": 0.9, "b": 1.2, "c": 0.8, "d": 1.1}


def test_the_slower_half_is_given_up_and_all_that_are_left_run_equally_often() -> None:
    found, _ = tried(TIMES)
    assert found.best == "c"
    assert {name: len(runs) for name, runs in found.steps_s.items()} == {AS_IT_WAS: 6, "a": 4, "b": 2, "c": 6, "d": 2}
    assert {*found.given_up} == {"a", "b", "d"}
    gain_s, low_s, high_s = found.gain
    assert low_s <= gain_s <= high_s
    assert gain_s == pytest.approx(0.2, abs=0.01)


def test_a_plan_whose_job_fails_is_given_up_with_its_reason() -> None:
    found, _ = tried(TIMES, failing="c")
    assert found.best == "a"
    assert "out of memory" in found.given_up["c"]


def test_where_every_plan_fails_there_is_no_best_one() -> None:
    found, _ = tried({AS_IT_WAS: 1.0, "a": 0.9}, failing="a")
    assert found.best is None


@pytest.mark.parametrize(("best_s", "is_kept"), [(0.8, True), (1.0, False)])
def test_only_a_plan_that_is_clearly_faster_is_kept(tmp_path: Path, best_s: float, is_kept: bool) -> None:
    found, _ = tried({AS_IT_WAS: 1.0, "a": best_s})
    told = keep(found, Plan(training={"batch_size": 24}), tmp_path)
    assert (tmp_path / "plan.toml").exists() is is_kept
    assert ("the run stays as it was" in told) is not is_kept
    assert json.loads((tmp_path / "plans.json").read_text())["gain_s"] == pytest.approx(1.0 - best_s, abs=0.01)
    if is_kept:
        assert Plan.load(tmp_path / "plan.toml").training.batch_size == 24


def recording(tmp_path: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    return {"arguments": [*arguments], "directory": str(tmp_path), "variables": variables}


@pytest.mark.parametrize("given", [["--plan", "p.toml"], ["--plan=p.toml"], []])
def test_another_plan_takes_the_place_of_the_runs_own(tmp_path: Path, given: list[str]) -> None:
    Plan(training={"batch_size": 24}).save(tmp_path / "p.toml")
    variables = {"TORSH_PLAN__TRAINING__STEPS": "7", **({} if given else {"TORSH_PLAN": "p.toml"})}
    recorded = recording(tmp_path, "--nproc-per-node", "2", *given, "train.py", "--plan", "of the script", **variables)
    plan = recorded_plan(recorded)
    assert (plan.training.batch_size, plan.training.steps) == (24, 7)
    changed = with_plan(recorded, tmp_path / "other.toml")
    rest = ["--nproc-per-node", "2", "train.py", "--plan", "of the script"]
    assert changed["arguments"] == ["--plan", str(tmp_path / "other.toml"), *rest]
    assert changed["variables"] == {}


def test_a_run_without_a_plan_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="recorded without a plan file"):
        recorded_plan(recording(tmp_path, "--nproc-per-node", "2", "train.py", "--plan", "of the script"))


def test_one_of_both_ways_is_asked_for(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, [str(tmp_path)])
    assert shown.exit_code != 0
    assert "--model MODEL looks for plans" in str(shown.exception) + shown.output


SCRIPT = """
import torch
from torch import nn
import torsh_distributed as td

def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    return nn.Sequential(*layers), (torch.zeros(1, 64),)

if __name__ == "__main__":
    td.init()
    plan = td.Plan.from_env()
    model, _ = build()
    engine = td.parallelize(model, torch.optim.AdamW, plan, loss_fn=nn.functional.mse_loss)
    for _ in range(6):
        data = torch.randn(8 // plan.resolve(2).mesh.data_degree, 64)
        engine.step((data, data))
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.matrix  # six jobs
def test_a_recorded_job_is_tried_with_other_plans(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    Plan(training={"batch_size": 8}).save(tmp_path / "p.toml", with_defaults=False)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "XDG_STATE_HOME": str(tmp_path / "state")}

    def torsh(*args: str) -> str:
        line = [sys.executable, "-m", "torsh_distributed.cli.entry_point", *args]
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    torsh("run", "--nproc-per-node", "2", "--trace", "out", "--plan", "p.toml", "job.py")
    told = torsh("tune", "out", "--model", "job:build", "--plans", "2", "--rounds", "1")
    assert "plan 1, " in told
    found = json.loads((tmp_path / "out" / "tuning" / "plans.json").read_text())
    assert len(found["steps_s"][found["plan"]]) == 2, "a round for both, and one for the better one"
