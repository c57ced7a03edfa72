"""The mean of sparse messages: owners, damaged messages, ranks that disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.compress.codecs.checks import gradient
from tests.compress.examples import examples
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.magnitude import ThresholdCodec
from torsh_distributed.compress.exchange import sparse_exchange
from torsh_distributed.compress.exchange.sparse_exchange import BlockCyclic
from torsh_distributed.compress.messages.sparse import Sparse
from torsh_distributed.errors import CompressionError


@examples
@given(st.integers(0, 2000), st.integers(1, 7), st.floats(0, 1))
def test_every_element_has_one_owner_and_finds_its_way_back(num_elements: int, num_ranks: int, density: float) -> None:
    owners = BlockCyclic(num_elements, num_ranks)
    indices = (torch.rand(num_elements, generator=torch.Generator().manual_seed(1)) < density).nonzero().squeeze(1)
    shares = owners.split(Sparse(indices, indices.float()))
    assert sum(owners.numel(owner) for owner in range(num_ranks)) == num_elements
    for owner, share in enumerate(shares):
        assert (share.indices < owners.numel(owner)).all()
        assert (share.indices[1:] > share.indices[:-1]).all()
        assert torch.equal(owners.to_global(share, owner).indices.float(), share.values)
    assert torch.equal(torch.cat([share.values for share in shares]).sort().values, indices.float())


def test_owners_are_balanced_where_large_elements_come_in_runs() -> None:
    run = torch.arange(5000, 7000)
    counts = [share.indices.numel() for share in BlockCyclic(100_000, 4).split(Sparse(run, run.float()))]
    assert max(counts) - min(counts) <= 64


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def average_when_equal() -> torch.Tensor:
    """All ranks select the same elements, as many as may come back: nothing is left out."""
    x = torch.zeros(4096)
    x[::16] = 1.0 + dist.get_rank()
    averaged = ThresholdCodec(0.5).average(x, world_group(), Key())
    assert torch.equal(averaged.sent, x)
    return averaged.mean


def test_nothing_is_left_out_where_all_ranks_select_alike(world: World) -> None:
    expected = torch.zeros(4096)
    expected[::16] = 2.5
    for mean in world.run(average_when_equal, num_ranks=4, backend="shm"):
        assert torch.equal(mean, expected)


def average_damaged(collective: str) -> tuple[str, dict[str, Any]]:
    """A bit of what rank 1 sends changes on its way; gives the error of this rank."""
    send = getattr(sparse_exchange, collective)

    def damage(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.dtype == torch.uint8 and dist.get_rank() == 1:
            tensor = tensor.clone()
            tensor[40] ^= 16  # in the payload of the message to rank 0
        return send(tensor, *args, **options)

    setattr(sparse_exchange, collective, damage)
    try:
        make_codec("topk:0.1").average(gradient(4000, dist.get_rank()), world_group(), Key())
    except CompressionError as error:
        return error.message, error.context
    raise AssertionError("the damage went unnoticed")


def test_a_message_damaged_on_its_way_is_named_on_every_rank(world: World) -> None:
    errors = world.run(average_damaged, "all_gather", num_ranks=2)
    for message, context in errors:
        assert "checksum" in message
        assert context["from_rank"] == 1
    errors = world.run(average_damaged, "all_to_all_single", num_ranks=4, backend="shm")
    assert "checksum" in errors[0][0]
    assert (errors[0][1]["from_rank"], errors[0][1]["rank"]) == (1, 0)
    for message, context in errors[1:]:
        assert message == "rank 0 could not decode the message of rank 1"
        assert (context["from_rank"], context["rank"]) == (1, 0)


def average_with(methods: list[str], sizes: list[int]) -> str:
    """Each rank with its own method and size; gives the error of this rank."""
    codec = make_codec(methods[dist.get_rank()])
    try:
        codec.average(torch.ones(sizes[dist.get_rank()]), world_group(), Key())
    except CompressionError as error:
        return str(error)
    raise AssertionError("the difference went unnoticed")


@pytest.mark.parametrize(
    ("methods", "sizes"),
    [
        (["topk:0.1", "topk:0.2"], [1000, 1000]),
        (["topk:0.1", "threshold:0.1"], [1000, 1000]),
        (["randomk:0.1", "randomk:0.1"], [1000, 1001]),
        (["sketch:10", "sketch:11"], [1000, 1000]),
        (["powersgd:1", "powersgd:2"], [1000, 1000]),
    ],
)
def test_ranks_that_differ_raise_on_every_rank(world: World, methods: list[str], sizes: list[int]) -> None:
    for message in world.run(average_with, methods, sizes, num_ranks=2):
        assert "ranks differ in codec or size" in message
        assert f"num_elements={sizes}" in message
