"""`monitored_barrier` and deadlines of single calls on our groups, beside gloo's."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.meeting.monitored_barrier import missing_ranks
from torsh_distributed.errors import OperationTimeout

pytestmark = pytest.mark.ranks


def barriers(absent: list[int], wait_all: bool) -> str:
    for _ in range(3):
        dist.monitored_barrier(timeout=timedelta(seconds=10))
    said = ""
    if dist.get_rank() not in absent:
        started_s = time.monotonic()
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=wait_all)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
        assert time.monotonic() - started_s < 5
    if dist.get_backend() != "gloo":  # gloo's own group does not survive a barrier that failed
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == dist.get_world_size()
    return said


@pytest.mark.parametrize(("absent", "wait_all"), [([1], False), ([1, 2], True)])
def test_the_ranks_that_did_not_come_are_named_in_the_words_of_gloo(
    world: World, absent: list[int], wait_all: bool
) -> None:
    ours = world.run(barriers, absent, wait_all, num_ranks=3, backend="shm")
    shown = "Rank 1" if len(absent) == 1 else "Ranks 1, 2"
    assert ours[0] == f"[Rank 0]: {shown} failed to pass monitoredBarrier in 500 ms"
    if 2 not in absent:
        assert ours[2].startswith("[Rank 2]: Rank 2 successfully reached monitoredBarrier, but Rank 1 did not")


def late_calls() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.ones(4)
    group.allreduce([tensor], dist.ReduceOp.SUM, timeout=timedelta(seconds=10)).wait()
    group.broadcast(tensor, root=0, timeout=timedelta(seconds=10)).wait()
    group.reduce(tensor, root=0, op=dist.ReduceOp.SUM, timeout=timedelta(seconds=10)).wait()
    outputs = [torch.zeros(4) for _ in range(2)]
    group.allgather(outputs, tensor, timeout=timedelta(seconds=10)).wait()
    said = []
    if dist.get_rank() == 0:
        started_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            group.allreduce(tensor, op=dist.ReduceOp.SUM, timeout=timedelta(seconds=0.3)).wait()
        assert time.monotonic() - started_s < 5
        assert isinstance(caught.value, OperationTimeout)
        said.append(str(caught.value))
    else:
        time.sleep(1.0)
    return said


def test_a_call_can_have_a_deadline_of_its_own(world: World) -> None:
    said = world.run(late_calls, backend="shm")[0]
    assert "all_reduce" in said[0]


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
