"""A disk that is full: training goes on, says so, tries again, and saves once there is room."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.errors import CheckpointError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize


def train(folder: str, storage: str) -> tuple[list[str], int]:
    seen: list[Any] = []
    events.subscribe(seen.append, events.IncidentEvent, events.AlertEvent)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 4), nn.Linear(4, 1))
    plan = Plan.from_dict(
        {
            "training": {"steps": 10**7},
            "checkpoint": {"enabled": True, "dir": folder, "every_steps": 10**6},
            "recovery": {"storage": storage},
            "retry": {"initial_delay_s": 0.05, "max_delay_s": 0.05},
        }
    )
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-6), plan, loss_fn=nn.functional.mse_loss)
    for _ in range(2):  # memory that ranks share is a file too
        engine.step((torch.ones(2, 4), torch.ones(2, 1)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, before[1]))
    engine.checkpoints.ask()
    started, has_room, is_over = time.monotonic(), False, torch.zeros(1)
    while not is_over.item():
        engine.step((torch.ones(2, 4), torch.ones(2, 1)))
        failures = [one for one in seen if isinstance(one, events.AlertEvent)]
        if len(failures) == 2 and not has_room:
            has_room = True
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        is_saved = any(Path(folder).glob("step-*/COMMITTED"))
        is_over.fill_(float(is_saved))
        dist.broadcast(is_over, 0)
        assert time.monotonic() - started < 60, "the save is neither made nor its failure raised"
    engine.checkpoints.wait()
    engine.step((torch.ones(2, 4), torch.ones(2, 1)))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.checkpoints.close()
    texts = [f"{one.kind} {getattr(one, 'status', getattr(one, 'severity', ''))}" for one in seen]
    return texts, engine.num_steps


@pytest.mark.matrix
@pytest.mark.ranks
def test_training_goes_on_while_the_disk_is_full(world: World, tmp_path: Path) -> None:
    for texts, steps in world.run(train, str(tmp_path / "on"), "go_on", num_ranks=2, backend="torsh", timeout_s=90):
        assert steps > 10
        assert texts == ["incident open", "alert error", "alert error", "incident resolved"]
    with pytest.raises(CheckpointError, match="was not saved: rank 1"):
        world.run(train, str(tmp_path / "raise"), "raise", num_ranks=2, backend="torsh", timeout_s=90)
