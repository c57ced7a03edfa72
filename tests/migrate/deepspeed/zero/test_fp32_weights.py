"""Weights of a checkpoint in fp32, read by one rank of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.zero.fp32_weights import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torsh_distributed.migrate.deepspeed.zero.param_access import safe_get_full_fp32_param


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def read_on_one_rank(folder: str) -> None:
    """Rank 0 reads what all wrote, while the others wait for it elsewhere; runs on ranks."""
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        }
        engine = deepspeed.initialize(model=net(), config=config)[0]
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        engine.save_checkpoint(f"{folder}/{stage}")
        masters = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
        if dist.get_rank() == 0:
            weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{stage}")
            for name, value in weights.items():
                assert torch.equal(value, masters[name]), (stage, name)
            loaded = load_state_dict_from_zero_checkpoint(net(), f"{folder}/{stage}")
            assert torch.equal(loaded[0].weight, weights["0.weight"])
        dist.barrier()


@pytest.mark.ranks
def test_one_rank_reads_a_checkpoint_of_all(world: World, tmp_path: Path) -> None:
    assert world.run(read_on_one_rank, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=80) == [None, None]


def test_a_directory_without_a_whole_checkpoint_is_named(tmp_path: Path) -> None:
    place = tmp_path / "global_step1"
    place.mkdir()
    torch.save({}, place / "engine_state_rank0.pt")
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="global_step1")
