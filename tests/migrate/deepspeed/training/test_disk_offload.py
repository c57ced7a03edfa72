"""`offload_optimizer` with device nvme keeps masters and moments in a file, and trains as without it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.migrate import deepspeed

NUM_BYTES = 3 * 4 * (64 * 64 + 64)
"""Masters and two moments of the layer, in fp32."""


def layer() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(64, 64)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def engine_of(folder: str, stage: int, **more: Any) -> Any:
    offload = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
        **more,
    }
    return deepspeed.initialize(model=layer(), config=config)[0]


def train(engine: Any, steps: range, dtype: torch.dtype = torch.float32) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step, dist.get_rank()).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def run_on_disk(folder: str) -> dict[int, list[float]]:
    """Every stage, with a resume in between; runs on ranks."""
    found = {}
    for stage in range(4):
        engine = engine_of(folder, stage)
        losses = train(engine, range(3))
        share = 1 if stage == 0 else dist.get_world_size()
        assert engine.optimizer.disk.file_bytes >= NUM_BYTES / share
        engine.save_checkpoint(f"{folder}/saved{stage}")
        other = engine_of(folder, stage)
        other.load_checkpoint(f"{folder}/saved{stage}")
        found[stage] = losses + train(other, range(3, 5))
    half = engine_of(folder, 2, bf16={"enabled": True})
    assert train(half, range(3), torch.bfloat16) == pytest.approx(found[2][:3], rel=0.05)
    return found


@pytest.mark.ranks
def test_state_on_disk_gives_the_losses_of_one_process(world: World, tmp_path: Path) -> None:
    by_rank = world.run(run_on_disk, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=80)
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(5):
        losses = [model(batch(step, rank)).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            for stage in range(4):
                assert by_rank[rank][stage][step] == pytest.approx(float(losses[rank].detach()), rel=1e-5), stage


def parameters_on_disk(folder: str) -> list[str]:
    """What is logged where a script's parameters should be on disk; runs on ranks."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torsh_distributed").addHandler(handler)
    offload = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload},
    }
    deepspeed.initialize(model=layer(), config=config)
    return [text for text in seen if "offload_param" in text]


@pytest.mark.ranks
def test_parameters_that_stay_in_memory_are_said_on_one_rank(world: World, tmp_path: Path) -> None:
    first, second = world.run(parameters_on_disk, str(tmp_path), num_ranks=2, backend="torsh")
    assert len(first) == 1
    assert "parameters stay in memory" in first[0]
    assert second == []
