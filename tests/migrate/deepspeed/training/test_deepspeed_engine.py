"""The engine trains as DeepSpeed does: the same losses, stage by stage, format by format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bed.world import World
from tests.migrate.deepspeed.training import parity

MAIN = [
    parity.case(0, clip=0.5, gas=2),
    parity.case(1, "bf16", gas=2, clip=0.5),
    parity.case(2, "fp16", clip=0.5),
    parity.case(3, "bf16", gas=2),
    parity.case(3, gas=2, clip=0.5),
]


def losses_of_steps(by_rank: list[list[dict[str, list[float]]]], number: int, gas: int) -> list[float]:
    """The mean loss of every update, over ranks and microbatches, of one of the configs."""
    found = [by_rank[rank][number]["losses"] for rank in range(2)]
    starts = range(0, len(found[0]), gas)
    return [sum(sum(one[start : start + gas]) for one in found) / (2 * gas) for start in starts]


def _compare(world: World, configs: list[dict[str, Any]], timeout_s: float) -> None:
    theirs = world.run(parity.theirs, configs, num_ranks=2, backend=None, timeout_s=timeout_s)
    ours = world.run(parity.ours, configs, num_ranks=2, backend="torsh", timeout_s=timeout_s)
    worst = {}
    for number, config in enumerate(configs):
        gas = config["gradient_accumulation_steps"]
        pairs = zip(losses_of_steps(ours, number, gas), losses_of_steps(theirs, number, gas), strict=True)
        worst[parity.name_of(config)] = max(abs(mine - other) / other for mine, other in pairs)
    assert {name: f"{value:.2g}" for name, value in worst.items() if value > 1e-5} == {}, worst


@pytest.mark.needs_deepspeed
def test_losses_are_those_of_deepspeed(world: World) -> None:
    _compare(world, MAIN, 120.0)


@pytest.mark.needs_deepspeed
@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_losses_are_those_of_deepspeed_in_every_combination(world: World, stage: int, dtype: str) -> None:
    _compare(world, [parity.case(stage, dtype, gas, clip) for gas in (1, 2, 3) for clip in (0.0, 0.5)], 140.0)
