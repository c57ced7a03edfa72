"""Operations under way: waiting for them, once, twice and too late."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import OperationTimeout, TorshError


def run_asynchronously() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    works = [all_reduce(torch.full((1000,), float(me + number)), async_op=True) for number in range(5)]
    for number, work in enumerate(works):
        expected = sum(range(size)) + number * size
        assert work.wait().unique().tolist() == [expected]
        assert work.wait().unique().tolist() == [expected], "waiting twice gives the same"
    barrier()


@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_several_operations_are_under_way_at_once(world: World, backend: str) -> None:
    world.run(run_asynchronously, num_ranks=3, backend=backend)


def begin_and_wait_late() -> str:
    """Rank 0 starts two operations with a second for each, and waits for them when it is over; rank 1 joins the first.

    Rank 1 joins the second too, but only after that: a second counted from the wait would be enough.
    """
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 1:
        all_reduce(torch.ones(2))
        store.wait(["waiting"])
        time.sleep(0.3)
        try:
            all_reduce(torch.ones(2))
        except TorshError:
            return "rank 0 gave up"
        return "rank 0 had given its part"
    came = all_reduce(torch.ones(2), async_op=True, timeout_s=1.0)
    missing = all_reduce(torch.ones(2), async_op=True, timeout_s=1.0)
    time.sleep(1.1)
    assert came.wait().tolist() == [2.0, 2.0]
    store.set("waiting", "now")
    with pytest.raises(OperationTimeout) as caught:
        missing.wait()
    return str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_the_time_of_an_operation_counts_from_its_start(world: World, backend: str) -> None:
    message = world.run(begin_and_wait_late, backend=backend)[0]
    assert "all_reduce did not end within 1 s" in message
    assert "sequence=2" in message
