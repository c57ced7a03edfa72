"""`deepspeed.initialize` as scripts call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.pipe.pipeline_module import PipelineModule

SCRIPT = """
import json, os, pathlib, sys, time
import torch
import deepspeed

folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    deadline = time.monotonic() + 60
    while not (folder / "there").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # the other rank is in `initialize` by now
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    (folder / "config.json").write_text(json.dumps(config))
else:
    (folder / "there").touch()
model, _, _, _ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=str(folder / "config.json"))
loss = model(torch.ones(2, 4)).square().mean()
model.backward(loss)
model.step()
print("stepped", model.global_steps)
"""


@pytest.mark.ranks
def test_a_config_that_one_rank_writes_is_read_once_all_have_met(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torsh_distributed.run", "--as", "deepspeed", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "train.py"), str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == ["stepped 1", "stepped 1"]


class Mpu:
    """What Megatron passes without pipeline stages: `model` ranks have a layer together."""

    def __init__(self, model: int) -> None:
        self._model = model

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._model

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size() // self._model


def started(**more: Any) -> Any:
    model = more.pop("model", None) or nn.Linear(4, 4)
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    return deepspeed.initialize(model=model, config=config, **more)[0]


def with_mpu() -> None:
    alone = Mpu(1)
    engine = started(mpu=alone)
    assert engine.mpu is alone
    assert engine.train_micro_batch_size_per_gpu() == 2
    assert started(mesh_param=(2, 1)).dp_world_size == 2
    with pytest.raises(FeatureNotAvailable, match=r"get_tensor_model_parallel_world_size\(\) is 2") as caught:
        started(mpu=Mpu(2))
    assert "mesh.tp" in str(caught.value.hint)
    with pytest.raises(FeatureNotAvailable, match=r"mesh_param\[1\] is 2"):
        started(mesh_param=(1, 2))
    with pytest.raises(AssertionError, match="have all ranks of the job"):
        started(mesh_param=(1,))
    with pytest.raises(AssertionError, match="mpu must be None with pipeline parallelism"):
        started(model=PipelineModule([nn.Linear(4, 4)] * 2, num_stages=2, loss_fn=nn.MSELoss()), mpu=alone)


def test_an_mpu_of_data_parallel_ranks_is_taken(world: World) -> None:
    world.run(with_mpu, num_ranks=2)
