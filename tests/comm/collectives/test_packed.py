"""Fused and bucketed all-reduce: as if each tensor had travelled alone, in fewer messages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.collectives.packed import (
    bucketed_all_reduce,
    fused_all_reduce,
    multi_root_broadcast,
    plan_buckets,
    plan_fused,
    scatter_reduce,
    tree_broadcast,
)
from torsh_distributed.errors import InvalidArgument, RankOutOfBounds

SHAPES = [(3,), (), (2, 5), (0,), (1000,), (4, 1)]
BACKENDS = ["gloo", "shm"]


def tensors(rank: int) -> list[Tensor]:
    found = [torch.arange(float(torch.Size(shape).numel())).view(shape) + rank for shape in SHAPES]
    return [*found, *[tensor.to(torch.int64) for tensor in found[:2]], torch.ones(3, 2).t() * rank]


def counted(how: str) -> int:
    me, size = dist.get_rank(), dist.get_world_size()
    mine = tensors(me)
    expected = [sum(parts) for parts in zip(*[tensors(rank) for rank in range(size)], strict=True)]
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.CollectiveEvent)
    if how == "fused":
        results = fused_all_reduce(mine, threshold_bytes=200)
    else:
        results = bucketed_all_reduce(mine, bucket_bytes=64, algorithm="ring", deterministic=False)
    end()
    for result, tensor, wanted in zip(results, mine, expected, strict=True):
        assert result is tensor
        assert torch.equal(result, wanted)
    return len(seen)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("how", "num_operations"), [("fused", 3), ("bucketed", 4)])
def test_tensors_that_travel_together_end_as_if_alone(
    world: World, backend: str, how: str, num_operations: int
) -> None:
    assert world.run(counted, how, num_ranks=3, backend=backend) == [num_operations] * 3


def as_mean() -> list[float]:
    [one, two] = fused_all_reduce([torch.tensor([float(dist.get_rank())]), torch.ones(2)], "mean", deterministic=True)
    return [*one.tolist(), *two.tolist()]


def test_reductions_and_determinism_pass_through(world: World) -> None:
    assert world.run(as_mean) == [[0.5, 1.0, 1.0]] * 2


def nothing() -> list[Tensor]:
    return [*fused_all_reduce([]), *bucketed_all_reduce([])]


def test_no_tensors_is_no_operation(world: World) -> None:
    assert world.run(nothing) == [[], []]


sizes_and_kinds = st.lists(st.tuples(st.integers(min_value=0, max_value=100), st.sampled_from("ab")), max_size=30)


@given(tensors=sizes_and_kinds, limit=st.integers(min_value=1, max_value=120))
def test_buckets_hold_every_tensor_once_and_keep_their_size(tensors: list[tuple[int, str]], limit: int) -> None:
    sizes_bytes, kinds = [size for size, _ in tensors], [kind for _, kind in tensors]
    packs = plan_buckets(sizes_bytes, kinds, bucket_bytes=limit)
    assert sorted(index for pack in packs for index in pack) == list(range(len(tensors)))
    for pack in packs:
        assert len({kinds[index] for index in pack}) == 1
        assert list(pack) == sorted(pack)
        assert len(pack) == 1 or sum(sizes_bytes[index] for index in pack) <= limit


@given(tensors=sizes_and_kinds, threshold=st.integers(min_value=0, max_value=120))
def test_only_tensors_below_the_threshold_are_fused(tensors: list[tuple[int, str]], threshold: int) -> None:
    sizes_bytes, kinds = [size for size, _ in tensors], [kind for _, kind in tensors]
    packs = plan_fused(sizes_bytes, kinds, threshold_bytes=threshold)
    assert sorted(index for pack in packs for index in pack) == list(range(len(tensors)))
    for pack in packs:
        assert len({kinds[index] for index in pack}) == 1
        assert len(pack) == 1 or all(sizes_bytes[index] < threshold for index in pack)
    small = {kind for size, kind in tensors if size < threshold}
    assert sum(sizes_bytes[pack[0]] < threshold for pack in packs) == len(small)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="bucket_bytes must be above zero"):
        plan_buckets([1], ["a"], bucket_bytes=0)
    with pytest.raises(InvalidArgument, match="threshold_bytes must not be negative"):
        plan_fused([1], ["a"], threshold_bytes=-1)


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
