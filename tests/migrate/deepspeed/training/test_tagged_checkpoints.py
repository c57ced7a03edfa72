"""A run that DeepSpeed began continues here: its checkpoint, its loss scale, its losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bed.real_deepspeed import use_deepspeed
from tests.bed.world import World
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from tests.migrate.deepspeed.training import parity
from torsh_distributed.errors import CheckpointError

CASES = [(1, "fp16"), (2, "bf16"), (3, "bf16"), (3, "fp32")]


def _run(deepspeed: Any, stage: int, dtype: str, folder: str, *, begins: bool) -> dict[str, Any]:
    """Three steps and a save, or a load; then the losses of three more steps."""
    torch.manual_seed(5)
    model = parity.TinyLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}}
    config = parity.case(stage, dtype, scheduler=scheduler)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = torch.Generator().manual_seed(11 + dist.get_rank())
    batches = [torch.randint(0, parity.VOCABULARY, (4, 6), generator=data) for _ in range(6)]
    client_state = None
    losses = []
    if begins:
        for tokens in batches[:3]:
            engine.backward(engine(tokens))
            engine.step()
        engine.save_checkpoint(folder, client_state={"epoch": 7})
    else:
        _, client_state = engine.load_checkpoint(folder)
    for tokens in batches[3:]:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "steps": engine.global_steps, "client": client_state, "lr": engine.get_lr()}


def _begin(folder: str) -> list[dict[str, Any]]:
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    deepspeed = use_deepspeed()
    return [_run(deepspeed, stage, dtype, f"{folder}/{stage}{dtype}", begins=True) for stage, dtype in CASES]


def _go_on(folder: str) -> list[dict[str, Any]]:
    from torsh_distributed.migrate import deepspeed

    return [_run(deepspeed, stage, dtype, f"{folder}/{stage}{dtype}", begins=False) for stage, dtype in CASES]


@pytest.mark.needs_deepspeed
@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_run_of_deepspeed_continues_with_the_same_losses(
    world: World, deepspeed_world: DeepSpeedWorld, tmp_path: Path
) -> None:
    theirs = deepspeed_world.run_theirs(_begin, str(tmp_path), timeout_s=140)
    ours = world.run(_go_on, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=140)
    for rank in range(2):
        for case, mine, other in zip(CASES, ours[rank], theirs[rank], strict=True):
            assert mine["losses"] == pytest.approx(other["losses"], rel=1e-5), case
            assert mine["steps"] == other["steps"] == 6
            assert mine["lr"] == pytest.approx(other["lr"])
            assert mine["client"] == {"epoch": 7}


def _without_frozen(stage: int, folder: str) -> list[Any]:
    """Saves a fine-tuned head alone, and loads it into a model with another frozen body."""
    from torsh_distributed.migrate import deepspeed

    def engine_of(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    first, second = engine_of(1), engine_of(2)
    first.backward(first(torch.ones(2, 4)).square().sum())
    first.step()
    first.save_checkpoint(folder, exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        second.load_checkpoint(folder)
    path, _ = second.load_checkpoint(folder, load_module_strict=False)
    before, after, other = first.module_state_dict(), second.module_state_dict(), engine_of(2).module_state_dict()
    same_head = all(torch.equal(before[name], after[name]) for name in ("1.weight", "1.bias"))
    own_body = all(torch.equal(other[name], after[name]) for name in ("0.weight", "0.bias"))
    return [path, same_head, own_body]


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_are_left_out_if_asked(world: World, tmp_path: Path, stage: int) -> None:
    for found in world.run(_without_frozen, stage, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=60):
        assert found == [str(tmp_path / "global_step1"), True, True]
