"""A change of the plan while a job runs: a real rule, a real launcher, two ranks that change before the same update."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torsh_distributed as td
from tests.bed.world import World
from tests.launch.observing.test_job_observer import start
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.running_change import RunningChange
from torsh_distributed.train.job_changes.running_changes import RunningChanges, change_plan

pytestmark = pytest.mark.ranks

SCRIPT = """
import json, os, sys, time
from functools import partial
import torch
import torsh_distributed as td

folder = os.path.dirname(sys.argv[1])
plan = td.Plan(
    training={"steps": 100_000},
    checkpoint={"enabled": True, "dir": f"{folder}/kept", "every_steps": 100_000},
    ddp={"max_bucket_size_mb": 1},
)
td.init(plan)
torch.manual_seed(0)
sgd = partial(torch.optim.SGD, lr=0.001)
engine = td.parallelize(torch.nn.Linear(256, 256), sgd, plan, loss_fn=torch.nn.functional.mse_loss)
# Both ranks leave the loop by what they see in the plan: unless they change before the same update, one is left alone.
deadline = time.monotonic() + 100
while engine.plan.training.gradient_clipping is None and time.monotonic() < deadline:
    engine.step((torch.ones(4, 256) * (1 + td.rank()), torch.zeros(4, 256)))
    time.sleep(0.003 * (1 + td.rank()))
after = engine.num_steps
for _ in range(10):
    engine.step((torch.ones(4, 256), torch.zeros(4, 256)))
compressor = engine.strategy.compressor
report = {
    "after": after,
    "rate": engine.learning_rate.current,
    "method": compressor and compressor.config.method,
    "compressed": compressor and compressor.stats.num_tensors,
    "every_steps": engine.plan.checkpoint.every_steps,
    "weights": engine.unwrapped.weight.sum().item(),
}
with open(f"{folder}/rank-{td.rank()}.json", "w") as file:
    json.dump(report, file)
td.destroy_process_group()
"""

RULES = """
[[rule]]
name = "steps are made"
metric = "torsh_step"
value = 5
actions = ["log", "calm"]

[action.calm]
kind = "plan"
learning_rate_factor = 0.5
save_checkpoint = true
set.training.gradient_clipping = 0.5
set.compress.method = "int8"
set.compress.warmup_steps = 0
set.checkpoint.every_steps = 4
"""


def test_an_alert_changes_the_plan_of_two_ranks_before_the_same_update(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    job = start(tmp_path, SCRIPT, "--alerts", "rules.toml", "--html-report", "report.html")
    try:
        _, errors = job.communicate(timeout=120)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, errors
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert one == other
    assert one["after"] > 5
    assert (one["rate"], one["method"], one["every_steps"]) == (0.0005, "int8", 4)
    assert one["compressed"] >= 9
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert any(re.search(rf"0*{one['after'] - 1}$", name) for name in kept), kept
    assert len([name for name in kept if name.startswith("step")]) >= 3, "the one that was asked for, then every fourth"
    assert f"the plan changed after step {one['after'] - 1}: training.gradient_clipping = 0.5" in errors
    assert re.search(r"\(alert steps are made: rank [01](, rank 1)?; torsh_step is", errors)
    (data,) = re.findall(r'id="state">(.*?)</script>', (tmp_path / "report.html").read_text(), re.DOTALL)
    (shown,) = [row for row in json.loads(data)["incidents"] if row["type"] == "decision" and row["subject"] == "plan"]
    assert shown["choice"].startswith("training.gradient_clipping = 0.5")
    assert shown["reason"].startswith("alert steps are made")


def refused(sections: dict[str, Any], tables: list[dict[str, Any]]) -> list[str]:
    """What this Engine says to each change; nothing of it may change."""
    plan = td.Plan(**sections)
    engine = td.parallelize(nn.Linear(8, 8), partial(torch.optim.SGD, lr=0.1), plan, loss_fn=nn.functional.mse_loss)
    before, said = engine.plan, []
    for table in tables:
        try:
            change_plan(engine, RunningChange.from_dict(table))
        except ConfigurationError as error:
            said.append(error.message)
    assert engine.plan == before
    assert engine.learning_rate.current == 0.1
    return said


def test_what_this_job_cannot_take_is_refused_with_nothing_changed(world: World) -> None:
    tables = [
        {"learning_rate_factor": 0.5, "save_checkpoint": True},
        {"learning_rate_factor": 0.5, "set": {"checkpoint": {"every_steps": 5}}},
        {"learning_rate_factor": 0.5, "set": {"training": {"gradient_accumulation": 99}}},
        {"learning_rate_factor": 0.5, "set": {"compress": {"method": "int8"}}},
    ]
    said = world.run(refused, {"mesh": {"shard": 2}}, tables, num_ranks=2)[0]
    assert "checkpoint.enabled is off" in said[0]
    assert "checkpoint.enabled is off" in said[1]
    assert "training.gradient_accumulation 99 is above training.batch_size" in said[2]
    assert "cannot change how it sends gradients while it runs" in said[3]


class QuietLine:
    """A worker's line whose launcher is the test."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> bool:
        self.sent.append(message)
        return True

    def listen(self, kind: str, handler: Any) -> None:
        assert kind == "change"


def test_a_rank_promises_the_update_that_it_has_yet_to_begin() -> None:
    line, engine = QuietLine(), Any
    changes = RunningChanges(line)
    for _ in range(3):
        changes.before_update(engine)  # type: ignore[arg-type]  # nothing is due, so it is not looked at
        changes.update_done()
    changes.before_update(engine)  # type: ignore[arg-type]
    changes.before_update(engine)  # type: ignore[arg-type]  # the same update again, as after memory ran out
    changes.hear({"what": "prepare", "number": 1})
    assert line.sent == [{"type": "change", "what": "ready", "number": 1, "at": 4}]
    changes.hear({"what": "cancel", "number": 1})
    changes.update_done()
    changes.before_update(engine)  # type: ignore[arg-type]
    changes.hear({"what": "commit", "number": 1, "at": 5, "change": {}, "reason": ""})
    assert len(line.sent) == 1, "what was cancelled is not taken"
