"""A recorded run on real ranks: predicted before its first step, compared at its end; the next prediction uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bed.world import ROOT
from tests.planner.machine.test_machine_file import measurement
from torsh_distributed.plan import Plan
from torsh_distributed.planner.forecast.run_learning import keep_run, predicted_parts
from torsh_distributed.planner.machine.machine_file import MachineFile, fingerprint, machine_path
from torsh_distributed.planner.machine.past_runs import corrected_s
from torsh_distributed.planner.machine.this_machine import this_machine

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional

import torsh_distributed as td

td.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
engine = td.parallelize(model, torch.optim.AdamW, td.Plan(training={"batch_size": 8}), loss_fn=functional.mse_loss)
for _ in range(NUM_STEPS):
    engine.step((torch.randn(4, 16), torch.randn(4, 4)))
"""


@pytest.fixture
def measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of this machine, with rates that are far from true."""
    monkeypatch.setenv("TORSH_STATE_DIR", str(tmp_path / "state"))
    MachineFile(fingerprint(), {2: measurement()}).save(machine_path())
    return tmp_path


def record(folder: Path, num_steps: int) -> str:
    (folder / "train.py").write_text(SCRIPT.replace("NUM_STEPS", str(num_steps)))
    line = ["--nproc-per-node", "2", "--trace", str(folder / "trace"), "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", *line],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.mark.ranks
def test_a_recorded_run_corrects_the_next_prediction(measured_here: Path) -> None:
    said = record(measured_here, 5)
    assert "was predicted from rates to take" in said
    (run,) = MachineFile.load(machine_path()).past.runs
    assert (run.num_ranks, run.what) == (2, "Sequential, dp 2 × tp 1 × pp 1 = 2")
    plan = Plan(training={"batch_size": 8}).resolve(2)
    from_rates = predicted_parts(model(), plan, optimizer="AdamW", num_local=2)
    assert from_rates == pytest.approx(run.predicted_s)
    corrected = corrected_s(run.predicted_s, this_machine(2).past.factors(2))
    unpredicted = sum(seconds for part, seconds in run.measured_s.items() if not run.predicted_s[part])
    assert corrected == pytest.approx(run.total_s - unpredicted)


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_run_without_steps_teaches_nothing(measured_here: Path) -> None:
    assert "nothing is learned from this run" in record(measured_here, 0)
    assert MachineFile.load(machine_path()).past.runs == ()


def test_a_run_without_a_prediction_is_passed_over(measured_here: Path) -> None:
    events = measured_here / "events"
    events.mkdir()
    (events / "rank-0.jsonl").write_text('{"type": "step", "time": 1.0, "rank": 0, "step": 1, "duration_s": 0.1}\n')
    assert keep_run(measured_here) is None


def test_nothing_is_predicted_for_a_number_of_ranks_that_was_not_measured(measured_here: Path) -> None:
    plan = Plan(training={"batch_size": 8}).resolve(1)
    assert predicted_parts(model(), plan, optimizer="AdamW", num_local=1) is None


def test_a_model_that_cannot_be_traced_does_not_hold_a_run_up(measured_here: Path) -> None:
    class Branching(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values) if values.sum() > 0 else values

    plan = Plan(training={"batch_size": 8}).resolve(2)
    assert predicted_parts(Branching(4, 4), plan, optimizer="AdamW", num_local=2) is None


def test_a_file_of_before_there_were_runs_is_read(measured_here: Path) -> None:
    document = json.loads(machine_path().read_text())
    del document["runs"]
    machine_path().write_text(json.dumps(document))
    assert MachineFile.load(machine_path()).past.runs == ()


def test_a_file_of_another_format_is_said_and_holds_no_run_up(
    measured_here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = json.loads(machine_path().read_text())
    machine_path().write_text(json.dumps({**document, "format": 1}))
    plan = Plan(training={"batch_size": 8}).resolve(2)
    assert predicted_parts(model(), plan, optimizer="AdamW", num_local=2) is None
    assert "measure again: torsh bench machine" in caplog.text
