"""Activations in a file: the same gradients, less memory, and a file that is empty again after backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError, MemoryAllocationFailed
from torsh_distributed.parallel.activation import checkpoint_activations
from torsh_distributed.parallel.offload.disk_activations import DiskActivations, activations_to_disk
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.training import ActivationConfig
from torsh_distributed.train import parallelize

ROWS, WIDTH, LAYERS = 256, 128, 4
ACTIVATION = 4 * ROWS * WIDTH


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)))


def gradients(net: nn.Module, *, retain: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss = net(torch.randn(ROWS, WIDTH)).square().mean()
    if retain:
        loss.backward(retain_graph=True)
        net.zero_grad()
    loss.backward()
    return [param.grad for param in net.parameters() if param.grad is not None]


def on_disk(folder: Path, net: nn.Module, **keys: Any) -> DiskActivations:
    made = activations_to_disk(net, ActivationConfig(disk_dir=str(folder), **keys))
    assert made is not None
    return made


@pytest.mark.parametrize("retain", [False, True])
def test_gradients_are_the_same_bit_for_bit_and_the_file_is_empty_again(tmp_path: Path, retain: bool) -> None:
    net = model()
    disk = on_disk(tmp_path, net)
    for expected, found in zip(gradients(model()), gradients(net, retain=retain), strict=True):
        assert torch.equal(expected, found)
    assert disk.use.peak_bytes >= 2 * LAYERS * ACTIVATION, "inputs of every Linear and every GELU"
    assert disk.use.used_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_only_the_inputs_of_recomputed_layers_are_written(tmp_path: Path) -> None:
    net = model()
    config = ActivationConfig(strategy="uniform", every_n_layers=1)
    checkpoint_activations(net, config)
    disk = on_disk(tmp_path, net)
    for expected, found in zip(gradients(model()), gradients(net), strict=True):
        assert torch.equal(expected, found)
    assert ACTIVATION <= disk.use.peak_bytes <= (LAYERS + 2) * ACTIVATION
    assert disk.use.used_bytes == 0


def test_what_exceeds_the_budget_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    net = model()
    disk = on_disk(tmp_path, net, disk_budget_gb=2 * ACTIVATION / 2**30)
    with pytest.raises(MemoryAllocationFailed, match=r"raise activation.disk_budget_gb by at least \d+ bytes$"):
        gradients(net)
    assert disk.use.peak_bytes <= disk.use.budget_bytes
    with torch.no_grad():
        net(torch.randn(ROWS, WIDTH))


def test_activations_go_to_one_place() -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Plan.from_dict({"activation": {"offload_to_cpu": True, "disk_dir": "x"}})


def losses_of(activation: dict[str, Any]) -> list[float]:
    plan = Plan.from_dict({"mesh": {"dp": 1, "shard": 2}, "activation": activation, "training": {"batch_size": ROWS}})
    engine = parallelize(model(), torch.optim.AdamW, plan, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(ROWS // 2, WIDTH, generator=generator)
    return [engine.step((rows, rows)) for _ in range(3)]


def both_losses(folder: str) -> tuple[list[float], list[float]]:
    return losses_of({}), losses_of({"disk_dir": folder})


def test_shards_train_with_activations_on_disk(world: World, tmp_path: Path) -> None:
    for expected, found in world.run(both_losses, str(tmp_path), timeout_s=60):
        assert found == expected
