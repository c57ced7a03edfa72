"""Steps that survive: too little memory, a loss that diverges; the rest of the run is the undisturbed one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.elastic import inject
from torsh_distributed.errors import MemoryAllocationFailed, NonFiniteLoss
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize


class Narrow(nn.Module):
    """Runs out of memory, as an allocator would say it, for more samples at once than fit."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, track_running_stats=True), nn.Linear(16, 1))
        self.inner[1].eval()
        self.fits = fits
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x))
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")
        return self.inner(x)


def make(fits: int, **sections: Any) -> tuple[Engine, DataLoader[Any], Narrow]:
    torch.manual_seed(1)
    model = Narrow(fits)
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 1, generator=generator))
    plan = Plan.from_dict({"training": {"steps": 6, "batch_size": 16, "seed": 3}, **sections})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
    return engine, DataLoader(data, batch_size=16, shuffle=True), model


def incidents() -> list[events.IncidentEvent]:
    seen: list[events.IncidentEvent] = []
    events.subscribe(seen.append, events.IncidentEvent)  # type: ignore[arg-type]
    return seen


def weights(engine: Engine) -> list[float]:
    return torch.cat([param.detach().flatten() for param in engine.unwrapped.parameters()]).tolist()


SMALLER = {"recovery": {"out_of_memory": "smaller_microbatch"}}


def short_of_memory() -> None:
    """Rank 1 has little memory, rank 0 has enough."""
    plain, loader, _ = make(99)
    expected = [plain.step(batch) for batch in plain.batches(loader)]
    seen = incidents()
    engine, loader, model = make(3 if dist.get_rank() else 99, **SMALLER)
    losses = [engine.step(batch) for batch in engine.batches(loader)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert weights(engine) == pytest.approx(weights(plain), rel=1e-4, abs=1e-6)
    if dist.get_rank() == 0:
        assert model.seen == [4, 4] * 6
        assert seen == []
    else:
        assert model.seen[:1] == [4]
        assert model.seen[1:] == [2, 2, 2, 2] * 6
        assert [(one.failure, one.status, one.step) for one in seen] == [
            ("out_of_memory", "open", 0),
            ("out_of_memory", "resolved", 1),
        ]
        assert "20.00 GiB" in (seen[0].detail or "")


def injected_shortage() -> None:
    engine, loader, _ = make(99, **SMALLER)
    with inject("out_of_memory rank 1 at step 2 in forward"):
        losses = [engine.step(batch) for batch in engine.batches(loader)]
    plain, loader, _ = make(99)
    assert losses == pytest.approx([plain.step(batch) for batch in plain.batches(loader)], rel=1e-5)


def hopeless() -> None:
    """Not even one sample fits, on any rank."""
    engine, loader, _ = make(0, **SMALLER)
    with pytest.raises(MemoryAllocationFailed, match="does not suffice for one sample"):
        for batch in engine.batches(loader):
            engine.step(batch)


def rolled_back(skip: bool, folder: str) -> None:
    """A loss that is not finite once, because of what happens to a parameter, not because of the data."""
    plain, loader, _ = make(99)
    expected = [plain.step(batch) for batch in plain.batches(loader)]
    recovery = {"divergence": "roll_back", "roll_back_steps": 2, "skip_batches": skip}
    for place in ("memory", "checkpoint"):
        sections = {"recovery": {**recovery, "roll_back_from": place}}
        if place == "checkpoint":
            sections["checkpoint"] = {"enabled": True, "dir": f"{folder}/{skip}", "every_steps": 2}
        seen = incidents()
        engine, loader, _ = make(99, **sections)
        losses, steps, is_broken = [], [], False
        for batch in engine.batches(loader):
            if engine.num_steps == 5 and not is_broken:
                is_broken = True
                with torch.no_grad():
                    next(engine.unwrapped.parameters()).fill_(math.nan)
            losses.append(engine.step(batch))
            steps.append(engine.num_steps)
        assert math.isnan(losses[5])
        back = 2 if place == "memory" else 4  # the newest copy that is old enough, or the newest checkpoint
        assert steps == [1, 2, 3, 4, 5, back, *range(back + 1, 7)]
        assert [(one.failure, one.status) for one in seen] == [("divergence", "open"), ("divergence", "resolved")]
        if not skip:
            assert losses[:5] + losses[6:] == expected[:5] + expected[back:]
            assert weights(engine) == weights(plain)
        else:
            assert 4 * engine.epoch + engine.num_batches == 6 + 6 - back
        engine.checkpoints.close()


def limited() -> None:
    """A limit on the norm, which every step breaks."""
    recovery = {"divergence": "roll_back", "max_gradient_norm": 1e-9, "max_roll_backs": 2}
    engine, loader, _ = make(99, recovery=recovery)
    before = weights(engine)
    seen = incidents()
    with pytest.raises(NonFiniteLoss, match=r"above recovery\.max_gradient_norm 1e-09") as caught:
        for batch in engine.batches(loader):
            engine.step(batch)
            assert weights(engine) == before
    assert "rolled back 2 times" in caught.value.__notes__[0]
    assert [one.status for one in seen] == ["open", "failed"]


def all_of_it(folder: str) -> None:
    short_of_memory()
    injected_shortage()
    hopeless()
    rolled_back(skip=False, folder=folder)
    rolled_back(skip=True, folder=folder)
    limited()


@pytest.mark.ranks
def test_steps_survive_memory_and_divergence(world: World, tmp_path: Path) -> None:
    world.run(all_of_it, str(tmp_path), num_ranks=2, backend="torsh")


def sharded_roll_back() -> None:
    sections = {
        "mesh": {"shard": 2},
        "recovery": {"divergence": "roll_back", "roll_back_steps": 2, "skip_batches": False},
    }
    plain, loader, _ = make(99, mesh={"shard": 2})
    expected = [plain.step(batch) for batch in plain.batches(loader)]
    engine, loader, _ = make(99, **sections)
    losses, is_broken = [], False
    for batch in engine.batches(loader):
        if engine.num_steps == 3 and not is_broken:
            is_broken = True
            losses.append(engine.step((batch[0] * math.inf, batch[1])))
        else:
            losses.append(engine.step(batch))
    assert losses[:3] + losses[4:] == expected[:3] + expected[0:]


@pytest.mark.ranks
def test_shards_roll_back_too(world: World) -> None:
    world.run(sharded_roll_back, num_ranks=2, backend="torsh")
