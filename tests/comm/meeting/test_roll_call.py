"""After a failed wait, ranks that answer learn which ones do not."""

from __future__ import annotations

import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.meeting.roll_call import missing_ranks


def answer(absent: list[int]) -> list[int] | None:
    group = dist.group.WORLD
    assert group is not None
    found = None if dist.get_rank() in absent else missing_ranks(group, "all_reduce/1")
    dist.barrier()
    return found


def test_the_silent_ranks_are_named(world: World) -> None:
    assert world.run(answer, [1], num_ranks=3) == [[1], None, [1]]


def test_nobody_is_missing_when_all_answer(world: World) -> None:
    assert world.run(answer, [], num_ranks=3) == [[], [], []]
