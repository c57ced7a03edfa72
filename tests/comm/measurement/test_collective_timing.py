"""Timing collectives on real ranks."""

from __future__ import annotations

import pytest

from tests.bed.world import World
from torsh_distributed.comm.measurement.collective_timing import OPERATIONS, CollectiveTiming, time_collective
from torsh_distributed.errors import InvalidArgument


def time_all() -> list[CollectiveTiming]:
    return [time_collective(op, 4096, duration_s=0.02) for op in OPERATIONS]


def test_every_operation_is_timed_alike_on_all_ranks(world: World) -> None:
    first, second = world.run(time_all, num_ranks=2, backend="shm")
    assert first == second, "the times are those of the slowest rank, on both"
    assert [timing.op for timing in first] == list(OPERATIONS)
    for timing in first:
        assert 0 < timing.best_s <= timing.median_s
        assert timing.bytes_per_s == pytest.approx(4096 / timing.median_s)


def test_an_unknown_operation_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidArgument, match="use one of: all_reduce"):
        time_collective("all_scatter", 4096)
