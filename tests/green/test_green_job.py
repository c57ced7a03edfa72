"""A real job under `torsh run` with a budget: it is paced, says what it spent, and saves when that is too much."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.test_app import torsh
from tests.green.nvml_stand_in import StandIn
from torsh_distributed.launch.local.exit_causes import SAVED_EXIT_CODE
from torsh_distributed.observe.job.run_files import EventFiles

pytestmark = pytest.mark.ranks

_SCRIPT = """
import os
from pathlib import Path
import torch
import torsh_distributed as td

plan = td.Plan.load(os.environ["TORSH_PLAN"])
td.init(plan)
model = torch.nn.Linear(8, 1)
engine = td.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01), plan, loss_fn=torch.nn.functional.mse_loss)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
counter = Path(os.environ["NVML_STAND_IN"], "energy-0")
for batch in engine.batches(torch.utils.data.DataLoader(data, batch_size=16)):
    engine.step(batch)
    counter.with_suffix(".new").write_text(str(100 * engine.num_steps))
    counter.with_suffix(".new").replace(counter)
"""


def plan_file(folder: Path, **green: object) -> str:
    checkpoint = f'[checkpoint]\nenabled = true\ndir = "{folder}/checkpoints"\nevery_steps = 1000000\n'
    rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in green.items())
    path = folder / "plan.toml"
    path.write_text(f"[training]\nsteps = 100000000\nbatch_size = 16\n{checkpoint}[green]\nenabled = true\n{rows}")
    return str(path)


def test_a_spent_budget_saves_and_ends_the_job_and_every_joule_is_accounted_for(tmp_path: Path) -> None:
    """Each step takes 0.1 J of a stand-in GPU: the budget of 18 J is spent after 180 of them."""
    gpu = StandIn(tmp_path / "nvml")
    gpu.write("energy-0", 0)
    gpu.write("limit-0", 650_000)
    (tmp_path / "train.py").write_text(_SCRIPT)
    plan = plan_file(
        tmp_path,
        interval_s=0.5,
        node_full_w=0.001,
        carbon="fixed",
        g_per_kwh=400.0,
        max_kwh=0.000005,
        on_budget="stop",
        gpu_limit_w=400.0,
        power_cap_w=500.0,
    )
    events = tmp_path / "events"
    done = torsh("run", "--plan", plan, str(tmp_path / "train.py"), TORSH_EVENTS_DIR=str(events), **gpu.variables)
    assert done.returncode == SAVED_EXIT_CODE, done.stderr
    assert re.search(r"of 5e-06 kWh energy are spent \([0-9]+%\); the job saves and ends", done.stderr)
    assert "limited to 400 W; 650 W is put back at the end" in done.stderr
    assert gpu.read("limit-0") == 650_000
    assert list((tmp_path / "checkpoints").iterdir())
    spent = EventFiles(events).read_all().energy.summary()
    assert spent is not None
    assert spent.num_steps >= 180
    # What the GPU has counted is in the account, whole; the last step may have written after the last reading.
    assert spent.measured_j == pytest.approx(gpu.read("energy-0") / 1e3, abs=0.2)
    parts = spent.steps_j + spent.start_j + spent.failures_j + spent.undone_j + spent.skipped_j + spent.other_j
    assert parts == pytest.approx(spent.total_j)
    # An epoch has 256 steps; what was counted before rank 0 told its epoch is in none.
    assert 0 < sum(one.joules for one in spent.by_epoch.values()) <= spent.total_j
    assert set(spent.by_epoch) <= set(range(spent.num_steps // 256 + 1))
    assert spent.grams == pytest.approx(spent.total_j / 3.6e6 * 400.0)
    records = [json.loads(line) for path in events.glob("launcher*") for line in path.read_text().splitlines()]
    assert [one["severity"] for one in records if one["type"] == "alert"][-1] == "stop"
    (carbon,) = [one for one in records if one["type"] == "carbon"]
    assert (carbon["source"], carbon["basis"], carbon["is_stale"]) == ("fixed", "given", False)
