"""What messages cost, measured on real groups."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.algorithms.auto.measured_costs import measure_costs
from torsh_distributed.comm.algorithms.base import MeasuredCosts


def measured() -> MeasuredCosts:
    return measure_costs(dist.group.WORLD)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_costs_are_measured_and_agreed(world: World, backend: str) -> None:
    found = world.run(measured, num_ranks=3, backend=backend)
    assert found[0] == found[1] == found[2]
    assert found[0].num_ranks == 3
    assert found[0].flat.latency_s > 0
    assert found[0].flat.byte_s > 0
    assert found[0].fold_byte_s > 0
    assert found[0].near is None
