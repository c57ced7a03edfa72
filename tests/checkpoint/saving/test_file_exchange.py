"""Nodes with disks of their own: each writes its ranks' files, and a load brings to each what it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.manifest import data_file
from torsh_distributed.errors import CheckpointError
from torsh_distributed.plan import CheckpointConfig


def manager_of(folder: str, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(dir=f"{folder}/node{dist.get_rank()}", per_node=True, keep=2, keep_best=0, **options)
    return CheckpointManager(config)


def state_of(value: float) -> dict[str, nn.Module]:
    model = nn.Linear(40, 30)
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(-value)
    return {"model": model}


def save_and_load(folder: str) -> tuple[list[str], list[str]]:
    mine = Path(folder) / f"node{dist.get_rank()}"
    with manager_of(folder) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(float(step)))
        manager.wait()
        before = sorted(path.name for path in (mine / "step-00000003").iterdir())
        target = state_of(0.0)
        found = manager.load(target)
        assert found.metadata.step == 3
        assert torch.equal(target["model"].weight, state_of(3.0)["model"].weight)
        return before, sorted(path.name for path in mine.glob("step-*"))


def load_again(folder: str, options: dict[str, Any]) -> tuple[int, float] | str:
    with manager_of(folder, **options) as manager:
        target = state_of(0.0)
        try:
            found = manager.load(target)
        except CheckpointError as error:
            return error.message
        assert manager.verify(found.metadata.step) == []
        return found.metadata.step, float(target["model"].weight[0, 0])


def save_with_remote(folder: str) -> None:
    with manager_of(folder, remote=f"{folder}/remote") as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(float(step)))


def test_a_node_gets_what_it_lacks_from_the_others_or_from_the_remote_place(
    world: World, lab: Lab, tmp_path: Path
) -> None:
    hosts = lab.hosts(2)
    folder = str(tmp_path)
    for rank, (before, steps) in enumerate(world.run(save_and_load, folder, hosts=hosts)):
        assert data_file(rank) in before
        assert data_file(1 - rank) not in before
        assert steps == ["step-00000002", "step-00000003"]
    # A node is lost with its disk: its part of step 2 is gone, but step 3 was brought together on both.
    shutil.rmtree(tmp_path / "node1")
    assert world.run(load_again, folder, {}, hosts=hosts) == [(3, 3.0), (3, 3.0)]
    shutil.rmtree(tmp_path / "node1")
    shutil.rmtree(tmp_path / "node0" / "step-00000003")
    for text in world.run(load_again, folder, {}, hosts=hosts):
        assert "__1_0.distcp" in text
        assert "is whole on no node" in text
    world.run(save_with_remote, f"{folder}/b", hosts=hosts)
    assert sorted(path.name for path in (tmp_path / "b" / "remote").iterdir()) == ["step-00000002", "step-00000003"]
    shutil.rmtree(tmp_path / "b" / "node1")
    (tmp_path / "b" / "node0" / "step-00000003" / data_file(0)).write_bytes(b"damaged")
    remote = {"remote": f"{folder}/b/remote"}
    assert world.run(load_again, f"{folder}/b", remote, hosts=hosts) == [(3, 3.0), (3, 3.0)]
