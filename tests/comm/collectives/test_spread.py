"""Broadcasts along trees and from many roots, and scatter-reduce of sizes that do not divide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.spread import multi_root_broadcast, scatter_reduce, tree_broadcast
from torsh_distributed.errors import InvalidArgument, RankOutOfBounds

BACKENDS = ["gloo", "shm"]


def from_every_root() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        for shape in ((), (0,), (5, 3)):
            tensor = torch.full(shape, float(me))
            assert tree_broadcast(tensor, root) is tensor
            assert torch.equal(tensor, torch.full(shape, float(root)))
    strided = (torch.zeros(2, 3) + me).t()
    assert tree_broadcast(strided, size - 1, async_op=True).wait().unique().tolist() == [size - 1]
    group = dist.new_group(sorted({0, size - 1}))
    if me in (0, size - 1):
        assert tree_broadcast(torch.tensor(me), size - 1, group=group).item() == size - 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_brings_the_sources_values_to_all(world: World, backend: str, num_ranks: int) -> None:
    world.run(from_every_root, num_ranks=num_ranks, backend=backend)


def from_many_roots() -> list[list[float]]:
    me, size = dist.get_rank(), dist.get_world_size()
    sources = [*range(size), 0]
    given = [torch.full((index + 1,), float(10 * me + index)) for index in range(size + 1)]
    return [tensor.tolist() for tensor in multi_root_broadcast(given, sources)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_tensor_comes_from_its_own_root(world: World, backend: str) -> None:
    expected = [[0.0], [11.0] * 2, [22.0] * 3, [3.0] * 4]
    assert world.run(from_many_roots, num_ranks=3, backend=backend) == [expected] * 3


def shards(numel: int, op: str) -> list[int]:
    tensor = torch.arange(numel) * (dist.get_rank() + 1)
    before = tensor.clone()
    shard = scatter_reduce(tensor.view(1, -1), op)
    assert torch.equal(tensor, before)
    return shard.tolist()


@pytest.mark.parametrize("numel", [0, 2, 3, 7])
def test_scatter_reduce_gives_each_rank_its_shard_of_any_size(world: World, numel: int) -> None:
    for op, factor in (("sum", 1 + 2 + 3), ("max", 3)):
        whole = (torch.arange(numel) * factor).tensor_split(3)
        assert world.run(shards, numel, op, num_ranks=3) == [part.tolist() for part in whole]


def refused(case: str) -> None:
    if case == "count":
        multi_root_broadcast([torch.zeros(1)], [0, 1])
    elif case == "root":
        multi_root_broadcast([torch.zeros(1), torch.zeros(1)], [0, 7])
    elif case == "source":
        tree_broadcast(torch.zeros(1), 7)
    else:
        scatter_reduce(torch.zeros(1, dtype=torch.int32), "mean")


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("count", InvalidArgument, "each tensor needs a source"),
        ("root", RankOutOfBounds, "source 7 is not a rank of the group"),
        ("source", RankOutOfBounds, "src 7 is not a rank of the group"),
        ("mean", InvalidArgument, "mean is not defined for torch.int32"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(
    world: World, case: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        world.run(refused, case)
