"""`auto`: all ranks choose the same, from numbers they measured and agreed on, and remember it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.algorithms.base import LinkFigures
from torsh_distributed.comm.algorithms.links import measure_links
from torsh_distributed.comm.algorithms.registry import ALGORITHMS
from torsh_distributed.comm.collectives import all_reduce

BACKENDS = ["gloo", "shm"]


def measured() -> LinkFigures:
    return measure_links(dist.group.WORLD)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_links_are_measured_and_agreed(world: World, backend: str) -> None:
    found = world.run(measured, num_ranks=3, backend=backend)
    assert found[0] == found[1] == found[2]
    assert found[0].num_ranks == 3
    assert found[0].flat.latency_s > 0
    assert found[0].flat.byte_s > 0
    assert found[0].fold_byte_s > 0
    assert found[0].near is None


def decide() -> list[tuple[str, str]]:
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.DecisionEvent)
    me, size = dist.get_rank(), dist.get_world_size()
    for numel in (16, 100_000, 17, 100_001, 0):
        result = all_reduce(torch.full((numel,), float(me)), algorithm="auto")
        assert result.unique().tolist() == ([sum(range(size))] if numel else [])
    all_reduce(torch.zeros(16), algorithm="auto", deterministic=True)
    end()
    return [(event.choice, event.reason) for event in seen if isinstance(event, events.DecisionEvent)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_decides_the_same_once_for_each_size(world: World, backend: str) -> None:
    found = world.run(decide, num_ranks=3, backend=backend, timeout_s=60)
    assert found[0] == found[1] == found[2]
    small, large, deterministic = found[0]
    for choice, reason in (small, large):
        assert choice in (*ALGORITHMS, "backend")
        assert choice in reason
        assert "backend" in reason
    assert ALGORITHMS[deterministic[0]].keeps_rank_order
    assert "backend" not in deterministic[1]


def alone() -> float:
    return all_reduce(torch.tensor(3.0), algorithm="auto").item()


def test_a_world_of_one_has_nothing_to_measure(world: World) -> None:
    assert math.isclose(world.run(alone, num_ranks=1)[0], 3.0)
