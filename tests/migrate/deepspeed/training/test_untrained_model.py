"""`deepspeed.initialize` of a model without an optimizer: a reference or reward model that is only run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.zero.param_access import safe_get_full_fp32_param


def scorer(seed: int, *, is_frozen: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).eval()
    return model.requires_grad_(not is_frozen)


def inputs(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupLR", "params": {}},
        **more,
    }
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=config)
    assert (optimizer, loader, scheduler, engine.optimizer) == (None, None, None, None)
    return engine


def run_untrained(folder: str) -> list[list[float]]:
    """Each stage, frozen or not: outputs are those of rank 0's weights in one process; runs on ranks."""
    rank = dist.get_rank()
    found = []
    for stage in range(4):
        for is_frozen in (True, False):
            engine = engine_of(scorer(rank, is_frozen=is_frozen), stage)
            assert engine.get_lr() == [0.0]
            features = inputs(rank).requires_grad_()
            scores = engine(features)
            scores.sum().backward()  # through the model, as guidance by a reward does; nothing is divided
            expected = inputs(rank).requires_grad_()
            scorer(0, is_frozen=is_frozen)(expected).sum().backward()
            torch.testing.assert_close(features.grad, expected.grad)
            for call, given in ((engine.step, ()), (engine.backward, (scores.sum(),)), (engine.scale, (scores,))):
                with pytest.raises(AssertionError, match="must provide optimizer during init"):
                    call(*given)
            weight = safe_get_full_fp32_param(engine.module[0].weight)
            assert weight is None if is_frozen else torch.equal(weight, scorer(0, is_frozen=True)[0].weight)
            engine.save_checkpoint(f"{folder}/{stage}{is_frozen}")
            other = engine_of(scorer(7, is_frozen=True), 3 - stage)
            other.load_checkpoint(f"{folder}/{stage}{is_frozen}")
            assert torch.equal(other(inputs(rank)), scores.detach())
            found.append(scores.detach().flatten().tolist())
    half = engine_of(nn.Linear(4, 2).requires_grad_(False), 3, fp16={"enabled": True})
    with torch.no_grad():
        assert half(inputs(rank).half()).dtype is torch.float16
    return found


@pytest.mark.ranks
def test_a_model_without_an_optimizer_gives_the_outputs_of_one_process(world: World, tmp_path: Path) -> None:
    by_rank = world.run(run_untrained, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=60)
    for rank in range(2):
        with torch.no_grad():
            expected = scorer(0, is_frozen=True)(inputs(rank)).flatten().tolist()
        assert len(by_rank[rank]) == 8
        for scores in by_rank[rank]:
            assert scores == pytest.approx(expected, rel=1e-6)
