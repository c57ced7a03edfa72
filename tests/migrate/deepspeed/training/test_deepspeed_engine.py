"""The engine trains as DeepSpeed does: the same losses, stage by stage, format by format."""

from __future__ import annotations

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
WHOLE_TABLE = [
    parity.case(stage, dtype, gas, clip)
    for stage in range(4)
    for dtype in ("fp32", "bf16", "fp16")
    for gas in (1, 2, 3)
    for clip in (0.0, 0.5)
]


def _compare(world: World, configs: list[dict[str, object]], timeout_s: float) -> None:
    theirs = world.run(parity.theirs, configs, num_ranks=2, backend=None, timeout_s=timeout_s)
    ours = world.run(parity.ours, configs, num_ranks=2, backend="torsh", timeout_s=timeout_s)
    bad = []
    for rank in range(2):
        for config, a, b in zip(configs, ours[rank], theirs[rank], strict=True):
            worst = max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(a["losses"], b["losses"], strict=True))
            if worst > 1e-5:
                bad.append(f"{parity.name_of(config)}: rank {rank} differs by {worst:.2g}")
    assert not bad, "\n".join(bad)


@pytest.mark.needs_deepspeed
def test_losses_are_those_of_deepspeed(world: World) -> None:
    _compare(world, MAIN, 120.0)


@pytest.mark.needs_deepspeed
@pytest.mark.matrix
def test_losses_are_those_of_deepspeed_in_every_combination(world: World) -> None:
    _compare(world, WHOLE_TABLE, 590.0)
