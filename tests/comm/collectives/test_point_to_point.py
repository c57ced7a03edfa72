"""Messages between two ranks: tags, strides, any source."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.point_to_point import isend, recv, send


def send_in_a_ring() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    after, before = (me + 1) % size, (me - 1) % size
    outgoing = [isend(torch.full((3,), me * 10.0 + tag), after, tag=tag) for tag in (1, 2)]
    target = torch.zeros(3, 2)
    assert recv(target[:, 1], before, tag=2) == before
    assert recv(target[:, 0], before, tag=1) == before
    for work in outgoing:
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    assert target.tolist() == [[before * 10.0 + 1, before * 10.0 + 2]] * 3


@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_messages_arrive_under_their_tag(world: World, backend: str) -> None:
    world.run(send_in_a_ring, num_ranks=3, backend=backend)


def receive_from_anyone() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    if me == 0:
        found = {recv(value := torch.zeros(1)): value.item() for _ in range(size - 1)}
        assert found == {rank: float(rank) for rank in range(1, size)}
    else:
        send(torch.tensor([float(me)]), 0)


@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_a_receiver_without_a_source_learns_who_sent(world: World, backend: str) -> None:
    world.run(receive_from_anyone, num_ranks=3, backend=backend)
