"""A loop with Fabric and a plan: losses of one process, state of whole tensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed.heavy_imports import LIGHTNING
from tests.bed.world import World
from tests.integrations.test_lightning_trainer import PLANS, alone, data, net, place
from torsh_distributed.plan import Plan

pytestmark = pytest.mark.needs_library("lightning")


def loop(plan: dict[str, Any], file: Path) -> tuple[list[float], dict[str, Tensor]]:
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    from torsh_distributed.integrations.lightning_fabric import TorshFabricStrategy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric = Fabric(
            strategy=TorshFabricStrategy(plan=Plan(**plan)), accelerator="cpu", devices=2, plugins=[place()]
        )
        fabric.launch()
        plain = net()
        model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
        loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=2))
        losses, sums = [], []
        for number, (points, targets) in enumerate(loader):
            is_last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(points), targets) / 2
                fabric.backward(loss)
            sums.append(loss.detach())
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(fabric.all_reduce(torch.stack(sums).sum())))
                sums = []
        fabric.save(file, {"model": model})
    return losses, torch.load(file, weights_only=False)["model"]


def loop_all(folder: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [loop(plan, folder / f"{number}.ckpt") for number, plan in enumerate(PLANS)]


def test_a_fabric_loop_learns_as_one_process(world: World, tmp_path: Path) -> None:
    wanted, state = alone(4)
    for found in world.run(loop_all, tmp_path, timeout_s=100, imports=LIGHTNING):
        for losses, learned in found:
            assert losses == pytest.approx(wanted, abs=1e-5)
            for name, value in state.items():
                torch.testing.assert_close(learned[name], value, rtol=1e-4, atol=1e-5)
