"""The engine trains as DeepSpeed does: the same losses, stage by stage, format by format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bed.world import World
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from tests.migrate.deepspeed.training import parity

MAIN = [
    parity.case(1, "fp16", clip=0.5),
    parity.case(2, "bf16"),
    parity.case(3, gas=2, clip=0.5),
]


def losses_of_steps(by_rank: list[list[dict[str, list[float]]]], number: int, gas: int) -> list[float]:
    """The mean loss of every update, over ranks and microbatches, of one of the configs."""
    found = [by_rank[rank][number]["losses"] for rank in range(2)]
    starts = range(0, len(found[0]), gas)
    return [sum(sum(one[start : start + gas]) for one in found) / (2 * gas) for start in starts]


def compare(
    world: World,
    deepspeed_world: DeepSpeedWorld,
    configs: list[dict[str, Any]],
    scalings: list[Any],
    timeout_s: float,
) -> None:
    """Losses within 1e-5, scales and skipped steps equal."""
    theirs = deepspeed_world.run_theirs(parity.their_numbers, configs, scalings, timeout_s=timeout_s)
    ours = world.run(parity.our_numbers, configs, scalings, num_ranks=2, backend="torsh", timeout_s=timeout_s)
    worst = {}
    for number, config in enumerate(configs):
        gas = config["gradient_accumulation_steps"]
        mine, other = (losses_of_steps([losses for losses, _ in side], number, gas) for side in (ours, theirs))
        worst[parity.name_of(config)] = max(abs(a - b) / b for a, b in zip(mine, other, strict=True))
    assert {name: f"{value:.2g}" for name, value in worst.items() if value > 1e-5} == {}, worst
    for rank in range(2):
        for number, scaling in enumerate(scalings):
            assert ours[rank][1][number] == theirs[rank][1][number], scaling


@pytest.mark.matrix
@pytest.mark.needs_deepspeed
@pytest.mark.timeout(300)
def test_losses_and_loss_scales_are_those_of_deepspeed(world: World, deepspeed_world: DeepSpeedWorld) -> None:
    compare(world, deepspeed_world, MAIN, [parity.SCALES[4]], 140.0)


@pytest.mark.needs_deepspeed
@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_losses_are_those_of_deepspeed_in_every_combination(
    world: World, deepspeed_world: DeepSpeedWorld, stage: int, dtype: str
) -> None:
    configs = [parity.case(stage, dtype, gas, clip) for gas in (1, 2, 3) for clip in (0.0, 0.5)]
    if stage >= 2 and dtype == "bf16":
        configs.append(parity.case(stage, dtype, 3, data_types={"grad_accum_dtype": "fp32"}))
    compare(world, deepspeed_world, configs, parity.SCALES if (stage, dtype) == (0, "fp16") else [], 140.0)
