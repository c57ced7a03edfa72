"""Background jobs run in order, and a failure reaches every rank with the reason of the first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.compress.averaging.background import BackgroundExecutor
from torsh_distributed.errors import CommunicationError, TorshError


def run_jobs() -> None:
    """Runs on every rank: two jobs, then one that fails on rank 1 while the other ranks wait for it."""
    assert dist.group.WORLD is not None
    executor = BackgroundExecutor(dist.group.WORLD, torch.device("cpu"))
    assert executor.group is not dist.group.WORLD
    total = torch.ones(1)
    ended: list[BaseException | None] = []

    def multiply(group: dist.ProcessGroup) -> None:
        all_reduce(total, group=group).mul_(10)

    def add(group: dist.ProcessGroup) -> None:
        all_reduce(total, group=group).add_(1)

    executor.submit(multiply, ended.append)
    executor.run(add)
    assert (total.item(), ended) == (41.0, [None])

    def fail(group: dist.ProcessGroup) -> None:
        if dist.get_rank() == 1:
            raise ValueError("broken")
        all_reduce(total, group=group)

    expected = TorshError if dist.get_rank() == 1 else CommunicationError
    with pytest.raises(expected, match="ValueError: broken"):
        executor.run(fail)
    with pytest.raises(expected, match="ValueError: broken"):
        executor.run(lambda group: None)  # no job runs after a failure
    executor.close()


def test_jobs_run_in_order_and_all_ranks_learn_the_first_failure(world: World) -> None:
    world.run(run_jobs, num_ranks=2)
