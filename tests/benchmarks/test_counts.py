"""What a step does is counted: twice alike for the same code, and more for code that does more."""

from __future__ import annotations

import pytest

from benchmarks.cases.counts import counted
from benchmarks.harness import Measurement
from benchmarks.regression import COUNT_TOLERANCE
from tests.bed.world import World

pytestmark = pytest.mark.ranks


def medians(world: World, name: str) -> dict[str, float]:
    counts = world.run(counted, name, num_ranks=2, backend="torsh", timeout_s=120)[0]
    return {what: Measurement.of(samples).median for what, samples in counts.items()}


def test_two_runs_of_the_same_code_count_alike(world: World) -> None:
    first, second = medians(world, "replicas"), medians(world, "replicas")
    for what in ("collectives and messages", "bytes they carry"):
        assert first[what] == second[what]
    assert first == pytest.approx(second, rel=COUNT_TOLERANCE)


def test_more_work_is_counted(world: World) -> None:
    once, twice = medians(world, "replicas"), medians(world, "replicas, two passes")
    for what in ("operations of torch", "bytes allocated", "calls of this library"):
        assert twice[what] > once[what] * (1 + 2 * COUNT_TOLERANCE)
    assert twice["bytes they carry"] == once["bytes they carry"], "gradients of both passes travel together"
