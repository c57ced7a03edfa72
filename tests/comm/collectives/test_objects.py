"""Plain values between ranks, and tensors whose dim 0 differs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.objects import (
    all_gather_object,
    all_gather_varsize,
    broadcast_object,
    gather_object,
    recv_object,
    scatter_object,
    send_object,
)
from torsh_distributed.errors import SerializationError


def pass_values_around() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    value = {"rank": me, "list": [None, True, 1.5, b"x" * me], "tensor": torch.arange(me)}
    everyone = all_gather_object(value)
    assert [one["rank"] for one in everyone] == list(range(size))
    assert [len(one["list"][3]) for one in everyone] == list(range(size))
    assert broadcast_object(value, size - 1)["tensor"].tolist() == list(range(size - 1))
    gathered = gather_object(me * "a", 0)
    assert gathered == ([rank * "a" for rank in range(size)] if me == 0 else None)
    given = [(rank, "x" * rank) for rank in range(size)] if me == 0 else None
    assert scatter_object(given, 0) == (me, "x" * me)
    if size > 1 and me == 0:
        send_object({"to": 1}, 1, tag=7)
    if me == 1:
        assert recv_object(0, tag=7) == {"to": 1}
    uneven = all_gather_varsize(torch.full((me, 2), float(me)))
    assert [tuple(part.shape) for part in uneven] == [(rank, 2) for rank in range(size)]
    assert all((part == rank).all() for rank, part in enumerate(uneven))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_every_rank_gets_the_values_of_the_others(world: World, backend: str, num_ranks: int) -> None:
    world.run(pass_values_around, num_ranks=num_ranks, backend=backend)


def gather_something_else() -> str:
    with pytest.raises(SerializationError) as caught:
        all_gather_object(object())
    return str(caught.value)


def test_what_is_no_plain_value_is_refused(world: World) -> None:
    for message in world.run(gather_something_else):
        assert "it is a object" in message
