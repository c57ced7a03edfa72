"""Which step the survivors can go back to: the newest of which every part is left."""

from __future__ import annotations

import pytest

from torsh_distributed.checkpoint.replicas.neighbour_replicas import holders_of
from torsh_distributed.checkpoint.replicas.recovery import SurvivorReport, plan_recovery
from torsh_distributed.errors import CheckpointError

HOLDERS = tuple(holders_of(["node"] * 4))


def report(rank: int, own: tuple[int, ...], kept: tuple[int, ...]) -> SurvivorReport:
    """A survivor with snapshots of its own, and of the rank before it, at these steps."""
    inventory = [(rank, step) for step in own] + [((rank - 1) % 4, step) for step in kept]
    return SurvivorReport(rank, HOLDERS, ("127.0.0.1", 1), b"", tuple(inventory))


def test_the_lost_rank_comes_from_its_neighbour() -> None:
    plan = plan_recovery([report(rank, (10, 20), (10, 20)) for rank in (0, 1, 3)])
    assert (plan.step, plan.sources) == (20, (0, 1, 3, 3))


def test_a_copy_that_was_still_on_its_way_does_not_count() -> None:
    plan = plan_recovery([report(0, (10, 20), (10, 20)), report(1, (10, 20), (10,)), report(3, (10, 20), (10,))])
    assert (plan.step, plan.sources) == (10, (0, 1, 3, 3))


def test_what_cannot_be_restored_says_why() -> None:
    with pytest.raises(CheckpointError, match="rank 2 and rank 3, which kept its copy, are lost"):
        plan_recovery([report(rank, (10,), (10,)) for rank in (0, 1)])
    with pytest.raises(CheckpointError, match="no state was copied"):
        plan_recovery([report(rank, (), ()) for rank in (0, 1, 3)])
    with pytest.raises(CheckpointError, match="step 20 lacks rank 2; step 10 lacks rank 0, 1"):
        plan_recovery([report(0, (20,), (20,)), report(1, (20,), (20,)), report(3, (20, 10), (10,))])
    with pytest.raises(CheckpointError, match="no rank is left"):
        plan_recovery([])
