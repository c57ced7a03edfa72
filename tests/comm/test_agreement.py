"""Agreement: what differs, or fails, on one rank raises on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.agreement import end_together, exchange_or_fail, fail_together, require_same
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.errors import CommunicationError, ConfigurationError, InvalidArgument, ProcessFailure, TorshError


def compare(bucket_mb: float) -> list[int] | str:
    """Runs on every rank: the last one has another bucket size, and all have another step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = {"ddp": {"overlap": True, "mb": bucket_mb if rank == size - 1 else 25.0}, "step": rank}
    try:
        everyone = require_same(settings, group=dist.group.WORLD, except_for=("step",))
    except ConfigurationError as error:
        return error.message
    return [theirs["step"] for theirs in everyone]


def test_equal_settings_come_back_from_every_rank(world: World) -> None:
    assert world.run(compare, 25.0, num_ranks=3) == [[0, 1, 2]] * 3


def test_a_setting_that_differs_is_named_on_every_rank_without_its_equal_neighbours(world: World) -> None:
    expected = "the ranks' settings differ: rank 0 has ddp {'mb': 25.0}, rank 2 has {'mb': 1.0}"
    assert world.run(compare, 1.0, num_ranks=3) == [expected] * 3


EMPTY = InvalidArgument("the file is empty")


def exchange(failing: int) -> list[bytes] | str:
    rank = dist.get_rank()

    def make() -> bytes:
        if rank == failing:
            raise EMPTY
        return bytes([rank, 7])

    try:
        return exchange_or_fail("read its shard", dist.group.WORLD, make, num_bytes=2)
    except TorshError as error:
        return error.message


def test_an_exchange_gives_every_ranks_bytes_or_fails_on_all(world: World) -> None:
    assert world.run(exchange, -1, num_ranks=3) == [[b"\0\7", b"\1\7", b"\2\7"]] * 3
    told = "rank 1 could not read its shard: the file is empty"
    assert world.run(exchange, 1, num_ranks=3) == [told, EMPTY.message, told]
    assert exchange_or_fail("read its shard", None, lambda: b"x", num_bytes=1) == [b"x"]


def fail_on(rank: int, error: Exception = EMPTY) -> tuple[type, str]:
    try:
        with fail_together("read its shard", dist.group.WORLD):
            if dist.get_rank() == rank:
                raise error
    except Exception as raised:
        return type(raised), raised.message if isinstance(raised, TorshError) else str(raised)
    return type(None), ""


def test_an_error_of_one_rank_raises_on_all(world: World) -> None:
    told = (ProcessFailure, "rank 1 could not read its shard: the file is empty")
    assert world.run(fail_on, 1, num_ranks=3) == [told, (InvalidArgument, "the file is empty"), told]


def test_an_error_that_is_not_ours_raises_on_all_too(world: World) -> None:
    told = (ProcessFailure, "rank 0 could not read its shard: OSError: the disk is full")
    assert world.run(fail_on, 0, OSError("the disk is full"), num_ranks=2) == [(OSError, "the disk is full"), told]


def test_nothing_raises_where_no_rank_fails(world: World) -> None:
    assert world.run(fail_on, -1, num_ranks=2) == [(type(None), "")] * 2


def test_alone_the_error_is_simply_raised() -> None:
    with pytest.raises(InvalidArgument, match="the file is empty"), fail_together("read its shard", None):
        raise InvalidArgument("the file is empty")


def wait_for_a_message_that_never_comes() -> tuple[type, str]:
    """Rank 1 raises before it sends; the others wait for it."""
    buffer = torch.zeros(3)
    try:
        with end_together("send its part", group_over(range(dist.get_world_size()))) as group:
            if dist.get_rank() == 1:
                raise EMPTY
            dist.recv(buffer, 1, group=group)
    except TorshError as raised:
        return type(raised), raised.message
    return type(None), ""


def test_a_rank_that_fails_alone_releases_those_that_wait_for_it(world: World) -> None:
    told = (CommunicationError, "rank 1 ended the group: could not send its part: the file is empty")
    found = world.run(wait_for_a_message_that_never_comes, num_ranks=3, backend="torsh", timeout_s=15)
    assert found == [told, (InvalidArgument, "the file is empty"), told]
