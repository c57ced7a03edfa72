"""The world's group: up once, down any number of times, never in a forked child."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.groups import process_group as pg
from torsh_distributed.errors import BackendNotInitialized, InvalidArgument, RankOutOfBounds


def start(node: str | None = None) -> None:
    pg.start_world(
        "auto",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=20,
        node=node,
    )


def sum_and_place() -> tuple[float, int, int, int]:
    start(node="abc"[int(os.environ["RANK"]) // 2])
    value = torch.tensor(2.0 ** pg.rank())
    dist.all_reduce(value)
    place = (value.item(), pg.local_rank(), pg.local_world_size(), pg.node_rank())
    pg.destroy_process_group()
    return place


def test_ranks_meet_reduce_and_know_their_node(world: World) -> None:
    assert world.run(sum_and_place, num_ranks=3, backend=None) == [(7.0, 0, 2, 0), (7.0, 1, 2, 0), (7.0, 0, 1, 1)]


def start_stop_start() -> tuple[bool, bool, float]:
    start()
    up = pg.is_initialized()
    pg.destroy_process_group()
    pg.destroy_process_group()
    down = not pg.is_initialized()
    start()
    value = torch.ones(())
    dist.all_reduce(value)
    return up, down, value.item()


def test_a_world_can_be_started_again_after_it_was_taken_down(world: World) -> None:
    assert world.run(start_stop_start, num_ranks=1, backend=None) == [(True, True, 1.0)]


def start_twice() -> None:
    start()
    start()


def test_a_second_start_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="initialised already"):
        world.run(start_twice, num_ranks=1, backend=None)


def start_in_a_forked_child() -> str:
    start()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            start()
        except BackendNotInitialized as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reader, 1000).decode()


def test_a_forked_child_is_refused(world: World) -> None:
    [message] = world.run(start_in_a_forked_child, num_ranks=1, backend=None)
    assert "was forked from one with a process group" in message


def collect_membership() -> list[tuple[str, int, int]]:
    seen: list[tuple[str, int, int]] = []
    events.subscribe(lambda e: seen.append((e.action, e.world_size, e.rank)), events.MembershipEvent)
    start()
    pg.destroy_process_group()
    return seen


def test_joining_and_leaving_are_events_with_the_rank(world: World) -> None:
    seen = world.run(collect_membership, backend=None)
    assert seen == [[("joined", 2, rank), ("left", 2, rank)] for rank in (0, 1)]


def check_ranks() -> None:
    pg.validate_rank(1)
    pg.validate_rank(2)


def test_a_rank_beyond_the_group_is_refused(world: World) -> None:
    with pytest.raises(RankOutOfBounds, match=r"rank 2 is outside 0\.\.1"):
        world.run(check_ranks)


@pytest.mark.parametrize("ask", [pg.rank, pg.world_size, pg.backend, pg.local_rank])
def test_asking_before_init_says_what_to_call(ask: object) -> None:
    with pytest.raises(BackendNotInitialized, match=r"torsh_distributed\.init"):
        ask()  # type: ignore[operator]
