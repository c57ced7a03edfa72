"""The PPO example with actor, critic, reference and reward model has the losses of one process, and of DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.real_deepspeed import use_deepspeed
from tests.bed.world import ROOT, World
from tests.migrate.deepspeed.conftest import DeepSpeedWorld, deepspeed_world
from torsh_distributed.migrate.stand_in import install, uninstall

__all__ = ["deepspeed_world"]

SCRIPT = ROOT / "examples" / "migrate" / "deepspeed_chat.py"
STEPS = 4
Losses = list[tuple[float, float, float]]


def load_example() -> Any:
    """The script as a module, over whatever `import deepspeed` finds now."""
    spec = importlib.util.spec_from_file_location("deepspeed_chat", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["deepspeed_chat"] = found  # dataclasses look themselves up there
    spec.loader.exec_module(found)
    return found


def ours(stages: list[int]) -> dict[int, Losses]:
    """Runs on ranks."""
    install("deepspeed")
    example = load_example()
    return {stage: example.train(stage, STEPS) for stage in stages}


def theirs(stages: list[int]) -> dict[int, Losses]:
    """Through DeepSpeed itself; runs on ranks."""
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    sys.modules["deepspeed"] = use_deepspeed()
    example = load_example()
    example.deepspeed.init_distributed()
    return {stage: example.train(stage, STEPS) for stage in stages}


def one_process() -> list[Losses]:
    """The same loop by torch alone, with the samples of both ranks; by rank."""
    install("deepspeed")  # the script imports it
    try:
        example = load_example()
    finally:
        uninstall("deepspeed")
    models = example.make_models()
    optimizers = {
        name: torch.optim.AdamW(models[name].parameters(), lr=example.LEARNING_RATE, weight_decay=0.0)
        for name in ("actor", "critic")
    }
    found: list[Losses] = [[], []]
    for step in range(STEPS):
        seen = [example.make_experience(models, step, rank) for rank in range(2)]
        for _ in range(example.EPOCHS):
            by_name: dict[str, list[torch.Tensor]] = {}
            for name, loss in (("actor", example.actor_loss), ("critic", example.critic_loss)):
                by_name[name] = [loss(models[name](one.tokens), one) for one in seen]
                (sum(by_name[name]) / 2).backward()
                nn.utils.clip_grad_norm_(models[name].parameters(), example.GRADIENT_CLIPPING)
                optimizers[name].step()
                optimizers[name].zero_grad()
            for rank in range(2):
                actor, critic = (float(by_name[name][rank].detach()) for name in ("actor", "critic"))
                found[rank].append((actor, critic, seen[rank].reward))
    return found


def compare(by_rank: list[dict[int, Losses]], expected: list[Losses], rel: float) -> None:
    for rank in range(2):
        for stage, losses in by_rank[rank].items():
            for mine, other in zip(losses, expected[rank], strict=True):
                assert mine == pytest.approx(other, rel=rel, abs=rel), (stage, rank)


@pytest.mark.ranks
def test_ppo_with_four_models_has_the_losses_of_one_process(world: World) -> None:
    found = world.run(ours, [0, 1, 2, 3], num_ranks=2, backend="torsh", timeout_s=90)
    expected = one_process()
    assert len(expected[0]) == 2 * STEPS
    assert expected[0][-1][1] < expected[0][0][1]
    compare(found, expected, 1e-4)


@pytest.mark.needs_deepspeed
@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_ppo_with_four_models_has_the_losses_of_deepspeed(world: World, deepspeed_world: DeepSpeedWorld) -> None:
    found = world.run(ours, [2, 3], num_ranks=2, backend="torsh", timeout_s=90)
    other = deepspeed_world.run_theirs(theirs, [2, 3], timeout_s=140)
    for rank in range(2):
        assert found[rank].keys() == other[rank].keys() == {2, 3}
        for stage, losses in found[rank].items():
            for mine, theirs_ in zip(losses, other[rank][stage], strict=True):
                assert mine == pytest.approx(theirs_, rel=1e-5, abs=1e-5), (stage, rank)
