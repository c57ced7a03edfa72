"""`torsh run --plan auto`: rank 0 chooses, all ranks train by its plan, and it is kept for a restart."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.bed.world import ROOT, World
from tests.planner.live_memory import wide
from torsh_distributed import parallelize
from torsh_distributed.errors import ConfigurationError, InvalidArgument, ProcessFailure
from torsh_distributed.plan import Plan

pytestmark = pytest.mark.ranks

SCRIPT = """
import os

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import torsh_distributed as td

td.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
plan = td.Plan.from_env(os.environ).replace(training={"batch_size": 8, "steps": 3})
engine = td.parallelize(model, torch.optim.AdamW, plan, loss_fn=functional.mse_loss)
data = TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
for batch in engine.batches(DataLoader(data)):
    loss = engine.step(batch)
print(f"trained by {engine.plan.mesh.equation} to {loss:.6f}")
"""


def trained(kept: str | None) -> tuple[dict[str, object], float]:
    """Runs on every rank: the plan that it trained by, and the loss of a step on eight samples."""
    os.environ["TORSH_PLAN"] = "auto"
    if kept is not None:
        os.environ["TORSH_AUTO_PLAN"] = kept
    torch.manual_seed(0)
    model = wide()
    inputs, targets = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    plan = Plan.from_env(os.environ).replace(training={"batch_size": 8})
    engine = parallelize(model, torch.optim.AdamW, plan, loss_fn=functional.cross_entropy)
    start = engine.strategy.data_rank * 8 // engine.strategy.data_degree
    end = start + 8 // engine.strategy.data_degree
    return engine.plan.to_dict(), engine.step((inputs[start:end], targets[start:end]))


def test_all_ranks_train_by_the_plan_of_rank_0_as_one_process_would(world: World, tmp_path: Path) -> None:
    kept = tmp_path / "run" / "plan.toml"
    found = world.run(trained, str(kept), num_ranks=2)
    assert found[0] == found[1]
    plan = Plan.load(kept)
    plan.validate(2)
    assert plan.resolve(2).to_dict() == found[0][0]
    torch.manual_seed(0)
    model = wide()
    alone = functional.cross_entropy(model(torch.randn(8, 64)), torch.zeros(8, dtype=torch.int64))
    assert found[0][1] == pytest.approx(alone.item(), rel=1e-4)


def test_a_restarted_job_takes_the_plan_that_was_kept(world: World, tmp_path: Path) -> None:
    kept = tmp_path / "plan.toml"
    plan = Plan(dp=1, shard=2, fsdp={"strategy": "shard_optimizer"}, training={"batch_size": 8})
    plan.save(kept)
    for values, _ in world.run(trained, str(kept), num_ranks=2):
        assert values == plan.resolve(2).to_dict()


def no_inputs() -> None:
    """Runs on every rank: a forward that nothing is known about."""
    os.environ["TORSH_PLAN"] = "auto"

    class Pair(torch.nn.Linear):
        def forward(self, one: torch.Tensor, another: torch.Tensor) -> torch.Tensor:
            return super().forward(one) + another

    with pytest.raises((InvalidArgument, ProcessFailure), match="no inputs can be made for Pair"):
        parallelize(Pair(4, 4), torch.optim.AdamW, Plan(training={"batch_size": 8}))


def test_what_rank_0_cannot_plan_is_raised_on_all_ranks(world: World) -> None:
    world.run(no_inputs, num_ranks=2)


def elastic() -> None:
    """Runs on every rank, as under `torsh run --elastic`."""
    os.environ |= {"TORSH_PLAN": "auto", "TORSH_MEMBER": "0"}
    with pytest.raises(ConfigurationError, match="fixed number of ranks"):
        parallelize(wide(), torch.optim.AdamW, Plan(training={"batch_size": 8}))


def test_a_world_that_changes_is_refused(world: World) -> None:
    world.run(elastic, num_ranks=1)


def without_a_plan() -> list[str]:
    """Runs on every rank: what is logged where the script gives no plan, though the environment names one."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("torsh_distributed").addHandler(handler)
    os.environ["TORSH_PLAN"], os.environ["TORSH_PLAN__TRAINING__STEPS"] = "chosen.toml", "3"
    parallelize(wide(), torch.optim.AdamW, loss_fn=functional.cross_entropy)
    return [line for line in told if "has no effect" in line]


def test_a_plan_that_the_script_does_not_read_is_told_by_rank_0(world: World) -> None:
    first, second = world.run(without_a_plan, num_ranks=2)
    assert len(first) == 1
    assert "chosen.toml, TORSH_PLAN__TRAINING__STEPS has no effect" in first[0]
    assert "td.Plan.from_env()" in first[0]
    assert second == []


def run_with_auto(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    line = ["-m", "torsh_distributed.run", "--nproc-per-node", "2", "--plan", "auto", "train.py"]
    done = subprocess.run(
        [sys.executable, *line],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TORSH_STATE_DIR": str(folder / "state")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_launcher_says_if_nobody_asked_for_the_automatic_plan(tmp_path: Path) -> None:
    done = run_with_auto("print('trained')", tmp_path)
    assert done.stdout.count("trained") == 2
    assert "--plan auto chose nothing, because no rank called td.parallelize" in done.stderr


def test_the_launcher_says_auto_and_a_script_trains(tmp_path: Path) -> None:
    done = run_with_auto(SCRIPT, tmp_path)
    assert "chose nothing" not in done.stderr
    assert done.stdout.count("trained by") == 2
    (kept,) = tmp_path.glob("runs/*/plan.toml")
    Plan.load(kept).validate(2)
    assert "planned: " in done.stderr + done.stdout
    assert kept.parent.name in done.stderr + done.stdout
