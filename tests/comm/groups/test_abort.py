"""A blocked rank can always be released, and the survivors can go on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.bed.world import World
from tests.chaos.faults import mark, wait_for_mark
from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.comm.groups.manager import GroupManager
from torsh_distributed.errors import CommunicationError, InvalidArgument, TorshError

BACKENDS = ["gloo", "shm", "torsh"]


def start(backend: str) -> int:
    rank = int(os.environ["RANK"])
    process_group.start_world(
        backend,
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=20,
    )
    return rank


def abort_while_blocked(backend: str, use_subgroup: bool, folder: Path) -> tuple[str, str]:
    """Rank 1 never joins the all-reduce; rank 0 is released by a thread of its own, rank 2 by the others' leaving.

    Rank 1 stays until rank 0 is released: its leaving would do that too.
    """
    rank = start(backend)
    group = GroupManager().create_group("all", [0, 1, 2]).handle if use_subgroup else None
    barrier()
    if rank == 1:
        wait_for_mark(folder, rank=0, step=1, within_s=15)  # the deadline of the call is later
        return "", ""
    timer = threading.Timer(0.5, abort, args=["rank 1 is lost"], kwargs={"group": group})
    if rank == 0:
        timer.start()
    with pytest.raises(TorshError) as caught:
        all_reduce(torch.ones(10), group=group)
    if rank == 2:
        return "", ""
    mark(folder, step=1)
    timer.join()
    with pytest.raises(CommunicationError) as refused:
        barrier(group=group)
    return str(caught.value), str(refused.value)


@pytest.mark.parametrize("use_subgroup", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_releases_a_blocked_call_and_then_refuses(
    world: World, tmp_path: Path, backend: str, use_subgroup: bool
) -> None:
    [first, *_] = world.run(abort_while_blocked, backend, use_subgroup, tmp_path, num_ranks=3, backend=None)
    error, refusal = first
    assert "rank 1 is lost" in error
    assert "the group was aborted: rank 1 is lost" in refusal


def lose_a_rank_and_go_on(backend: str) -> tuple[int, int, float]:
    rank = start(backend)
    barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TorshError):
        all_reduce(torch.ones(10), timeout_s=10)
    abort("rank 1 died")
    new_rank = process_group.regroup([0, 2, 3])
    value = torch.tensor(float(rank))
    all_reduce(value)
    return new_rank, process_group.world_size(), value.item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_of_a_killed_rank_form_a_new_world(world: World, backend: str) -> None:
    outcomes = world.outcomes(lose_a_rank_and_go_on, backend, num_ranks=4, backend=None)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome, new_rank in ((outcomes[0], 0), (outcomes[2], 1), (outcomes[3], 2)):
        assert outcome.is_ok, outcome.trace
        assert outcome.value == (new_rank, 3, 5.0)


def shrink_twice() -> list[tuple[int, int]]:
    start("gloo")
    sizes = []
    # Rank 0 of the first world hosts the store, so it is among the survivors both times.
    for survivors in ([2, 1, 0], [2, 1]):
        if process_group.rank() not in survivors:
            return sizes
        process_group.regroup(survivors)
        value = torch.ones(())
        all_reduce(value)
        sizes.append((process_group.rank(), int(value)))
    return sizes


def test_a_world_can_be_regrouped_again_and_in_another_order(world: World) -> None:
    assert world.run(shrink_twice, num_ranks=3, backend=None) == [[(2, 3), (0, 2)], [(1, 3), (1, 2)], [(0, 3)]]


def regroup_wrongly(survivors: list[int]) -> None:
    start("gloo")
    barrier()  # all are up: rank 0, which hosts the store, leaves at once
    process_group.regroup(survivors)


@pytest.mark.parametrize("survivors", [[0, 0], [0, 5], []])
def test_wrong_survivors_are_refused(world: World, survivors: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="each once, and include the caller"):
        world.run(regroup_wrongly, survivors, backend=None)
