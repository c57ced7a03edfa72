"""Lightning's Trainer with a plan: losses and checkpoints of one process."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.bed.heavy_imports import LIGHTNING
from tests.bed.world import World
from torsh_distributed.plan import Plan

pytestmark = pytest.mark.needs_library("lightning")

PLANS: list[dict[str, Any]] = [{"dp": 2}, {"dp": 1, "shard": 2}]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def data() -> TensorDataset:
    torch.manual_seed(6)
    points = torch.randn(32, 6)
    return TensorDataset(points, points.sum(dim=1, keepdim=True))


def alone(num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Batches of 8, as two ranks of 4 see them: their samplers take turns."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(num_steps // 4 + 1):
        for points, targets in DataLoader(data(), batch_size=8):
            if len(losses) == num_steps:
                break
            loss = nn.functional.mse_loss(model(points), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def module(losses: list[float]) -> Any:
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):  # type: ignore[misc]  # optional
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, op=torch.distributed.ReduceOp.AVG)
            losses.append(mean.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Regression()


def place() -> Any:
    """The ranks of a test, which no launcher started."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Ranks(LightningEnvironment):  # type: ignore[misc]  # optional
        creates_processes_externally = True

        def world_size(self) -> int:
            return torch.distributed.get_world_size()

        def global_rank(self) -> int:
            return torch.distributed.get_rank()

        local_rank = global_rank

    return Ranks()


class Resumable(DataLoader[Any]):
    """Continues an epoch where it was left: without that Lightning begins the epoch again when it resumes in one."""

    num_taken = 0
    _skipped = 0

    def __iter__(self) -> Any:
        self.num_taken, self._skipped = self._skipped, 0
        for batch in itertools.islice(super().__iter__(), self.num_taken, None):
            self.num_taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_taken": self.num_taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped = state["num_taken"]


def fit(plan: dict[str, Any], folder: Path, *, until: str = "epochs") -> tuple[list[float], dict[str, Tensor]]:
    """Two runs, the second from the checkpoint of the first: after an epoch of four steps, or after three steps."""
    import lightning.pytorch as pl

    from torsh_distributed.integrations.lightning_trainer import TorshStrategy

    losses: list[float] = []
    ends = ({"max_epochs": 1}, {"max_epochs": 2}) if until == "epochs" else ({"max_steps": 3}, {"max_steps": 8})

    def trainer(end: dict[str, int]) -> Any:
        return pl.Trainer(
            strategy=TorshStrategy(plan=Plan(**plan)),
            accelerator="cpu",
            devices=2,
            plugins=[place()],
            use_distributed_sampler=False,  # its own always shuffles
            **end,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, on workers and loggers
        loader = Resumable(data(), batch_size=4, sampler=DistributedSampler(data(), shuffle=False))
        first = trainer(ends[0])
        first.fit(module(losses), loader)
        first.save_checkpoint(folder / "half.ckpt")
        again = module(losses)
        second = trainer(ends[1])
        loader = Resumable(data(), batch_size=4, sampler=DistributedSampler(data(), shuffle=False))
        second.fit(again, loader, ckpt_path=folder / "half.ckpt", weights_only=False)
        second.save_checkpoint(folder / "end.ckpt")
    return losses, torch.load(folder / "end.ckpt", weights_only=False)["state_dict"]


def fit_all(folder: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for number, plan in enumerate(PLANS):
        (folder / str(number)).mkdir(exist_ok=True)
        found.append(fit(plan, folder / str(number)))
    (folder / "steps").mkdir(exist_ok=True)
    found.append(fit(PLANS[0], folder / "steps", until="steps"))
    return found


def test_the_trainer_learns_and_resumes_as_one_process(world: World, tmp_path: Path) -> None:
    wanted, state = alone(8)
    for found in world.run(fit_all, tmp_path, timeout_s=100, imports=LIGHTNING):
        for losses, learned in found:
            assert losses == pytest.approx(wanted, abs=1e-5)
            for name, value in state.items():
                torch.testing.assert_close(learned[f"net.{name}"], value, rtol=1e-4, atol=1e-5)
