"""The test bed itself: results by rank, failures with their rank, hangs with stacks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World, WorldError


def sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was told to")
    return dist.get_rank()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_where_a_reader_finds_it() -> None:
    time.sleep(60)


def test_results_come_by_rank(world: World) -> None:
    assert world.run(sum_of_ranks, num_ranks=3) == [3.0, 3.0, 3.0]


def test_an_exception_keeps_its_type_and_names_the_rank(world: World) -> None:
    with pytest.raises(ValueError, match="rank 1 was told to") as caught:
        world.run(fail_on, 1)
    assert "--- rank 1 raised ValueError" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0]


def test_a_killed_rank_is_reported_as_such(world: World) -> None:
    with pytest.raises(WorldError, match="rank 1 was ended by signal 9"):
        world.run(die_on, 1)


def test_a_hang_shows_the_stack_of_every_rank(world: World) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(wait_where_a_reader_finds_it, timeout_s=1.0, backend=None)
    for rank in (0, 1):
        assert f"rank {rank} hung" in str(caught.value)
    assert str(caught.value).count("in wait_where_a_reader_finds_it") == 2


def test_a_world_after_a_failed_one_is_fresh(world: World) -> None:
    outcomes = world.outcomes(die_on, 0)
    assert [outcome.exit_code for outcome in outcomes if outcome.rank == 0] == [-9]
    assert world.run(sum_of_ranks) == [1.0, 1.0]
