"""The mesh: arithmetic for any world, and real groups that reduce over exactly the ranks they should."""

from __future__ import annotations

import logging
import math
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typing_extensions import override

from tests.bed.world import World
from torsh_distributed.comm.collectives.tensors import all_reduce
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import BackendNotInitialized, InvalidArgument, RankOutOfBounds
from torsh_distributed.parallel.mesh.layout import PP_FASTEST, TP_FASTEST, MeshLayout
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.plan import MeshConfig

AXES = ("dp", "shard", "tp", "pp", "ep", "cp")


@st.composite
def layouts(draw: st.DrawFn) -> MeshLayout:
    degrees = {axis: draw(st.integers(1, 3 if axis in ("dp", "tp") else 2)) for axis in AXES}
    return MeshLayout(MeshConfig(**degrees), draw(st.sampled_from([TP_FASTEST, PP_FASTEST])))


@settings(max_examples=40)
@given(layouts(), st.data())
def test_rank_and_coordinates_are_two_names_of_one_place(layout: MeshLayout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    coordinates = layout.coordinates(rank)
    assert layout.rank_at(**coordinates) == rank
    assert all(0 <= index < layout.degree(axis) for axis, index in coordinates.items())


@settings(max_examples=40)
@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_groups_along_axes_cover_every_rank_once(layout: MeshLayout, axes: set[str]) -> None:
    groups = list(layout.groups(*axes))
    assert sorted(rank for members in groups for rank in members) == list(range(layout.world_size))
    for members in groups:
        assert len(members) == math.prod(layout.degree(axis) for axis in axes)
        assert list(members) == sorted(members)
        for axis in set(AXES) - axes:
            assert len({layout.coordinates(rank)[axis] for rank in members}) == 1
        assert all(layout.group_ranks(rank, *axes) == members for rank in members)


@settings(max_examples=40)
@given(layouts())
def test_the_parts_of_a_batch_are_told_apart_by_the_data_axes_alone(layout: MeshLayout) -> None:
    for members in layout.groups("dp", "shard", "ep"):
        assert [layout.data_part(rank) for rank in members] == list(range(layout.config.data_degree))
    for members in layout.groups("tp", "pp", "cp"):
        assert len({layout.data_part(rank) for rank in members}) == 1


@settings(max_examples=40)
@given(layouts(), st.sampled_from(AXES))
def test_neighbours_along_an_axis_lead_from_head_to_tail(layout: MeshLayout, axis: str) -> None:
    for members in layout.groups(axis):
        walked: list[int] = []
        rank: int | None = members[0]
        while rank is not None:
            walked.append(rank)
            rank = layout.next_rank(rank, axis)
        assert tuple(walked) == members
        assert layout.is_head(members[0], axis)
        assert layout.is_tail(members[-1], axis)
        assert [layout.previous_rank(rank, axis) for rank in members] == [None, *members[:-1]]


def test_tensor_groups_are_neighbours_and_replicas_lie_farthest_apart() -> None:
    layout = MeshLayout(MeshConfig(dp=2, pp=2, tp=2))
    assert layout.group_ranks(0, "tp") == (0, 1)
    assert layout.group_ranks(0, "pp") == (0, 2)
    assert layout.group_ranks(0, "dp") == (0, 4)
    other = MeshLayout(MeshConfig(dp=2, pp=2, tp=2), PP_FASTEST)
    assert [other.group_ranks(0, axis) for axis in ("pp", "tp", "dp")] == [(0, 1), (0, 2), (0, 4)]


def test_a_tensor_group_over_two_nodes_is_found() -> None:
    layout = MeshLayout(MeshConfig(dp=2, tp=4))
    assert layout.crossing_groups("tp", [0, 0, 0, 0, 1, 1, 1, 1]) == []
    assert layout.crossing_groups("tp", [0, 0, 1, 1, 2, 2, 2, 2]) == [(0, 1, 2, 3)]


def test_places_that_do_not_exist_are_refused() -> None:
    layout = MeshLayout(MeshConfig(dp=2, tp=2))
    with pytest.raises(RankOutOfBounds, match=r"rank 4 is outside 0\.\.3"):
        layout.coordinates(4)
    with pytest.raises(RankOutOfBounds, match=r"tp 2 is outside 0\.\.1"):
        layout.rank_at(tp=2)
    with pytest.raises(InvalidArgument, match="no axis 'data'"):
        layout.group_ranks(0, "data")
    with pytest.raises(InvalidArgument, match="still has an unresolved degree"):
        MeshLayout(MeshConfig())
    with pytest.raises(InvalidArgument, match="names each axis once"):
        MeshLayout(MeshConfig(dp=2), ("dp", "tp"))
    with pytest.raises(BackendNotInitialized):
        Mesh(MeshConfig(dp=2))


def reduce_everywhere(config: MeshConfig) -> dict[tuple[str, ...], tuple[float, list[int]]]:
    mesh = Mesh(config)
    found: dict[tuple[str, ...], tuple[float, list[int]]] = {}
    for axes in (("dp",), ("shard",), ("tp",), ("dp", "tp"), ("dp", "shard"), ("pp",), ("dp", "shard", "tp")):
        group = mesh.group(*axes)
        total = all_reduce(torch.tensor(10.0**mesh.rank), group=group)
        found[axes] = (float(total), dist.get_process_group_ranks(group))
    assert mesh.group("dp") is mesh.group("dp", "pp"), "an axis with one rank adds nothing"
    assert mesh.data_group is mesh.group("dp", "shard")
    assert mesh.device_mesh.mesh_dim_names == mesh.layout.used_axes
    rows = distribute_tensor(torch.arange(8.0), mesh.slice("shard"), [Shard(0)])
    assert isinstance(rows, DTensor)
    assert rows.to_local().numel() == 4
    torch.testing.assert_close(rows.full_tensor(), torch.arange(8.0))
    assert mesh.slice("dp", "shard").shape == ((config.dp, 2) if config.dp > 1 else (2,))
    assert mesh.slice("pp").shape == (1,)
    return found


@pytest.mark.parametrize(
    ("backend", "config"), [("gloo", MeshConfig(dp=1, shard=2, tp=2)), ("torsh", MeshConfig(dp=2, shard=2, tp=2))]
)
def test_groups_reduce_over_the_ranks_of_the_layout(world: World, backend: str, config: MeshConfig) -> None:
    layout = MeshLayout(config)
    results = world.run(reduce_everywhere, config, num_ranks=layout.world_size, backend=backend, timeout_s=60)
    for rank, found in enumerate(results):
        for axes, (total, members) in found.items():
            assert tuple(members) == layout.group_ranks(rank, *axes)
            assert total == sum(10.0**member for member in members)


def halves() -> tuple[float, list[int], float]:
    """The last four of six ranks, as a mesh of their own: two replicas of two shards."""
    rank = dist.get_rank()
    members = [2, 3, 4, 5] if rank > 1 else [0, 1]
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    mesh = Mesh(MeshConfig(dp=-1, shard=2), group=group)
    assert mesh.group("dp", "shard") is group
    total = float(all_reduce(torch.tensor(10.0**rank), group=mesh.group("shard")))
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(rank)
    wrapped = FullyShardedDataParallel(model, mesh=mesh)
    return total, dist.get_process_group_ranks(mesh.group("dp")), float(wrapped.full_state_dict()["weight"].mean())


def test_a_mesh_may_lie_over_a_group(world: World) -> None:
    results = world.run(halves, num_ranks=6, timeout_s=60)
    totals = [11.0, 11.0, 1100.0, 1100.0, 110000.0, 110000.0]
    across = [[0], [1], [2, 4], [3, 5], [2, 4], [3, 5]]
    firsts = [0.0, 0.0, 2.0, 2.0, 2.0, 2.0]
    assert results == list(zip(totals, across, firsts, strict=True))


def warned_of_crossing() -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    process_group.start_world(
        "gloo",
        rank=int(dist_env("RANK")),
        world_size=2,
        master_addr=dist_env("MASTER_ADDR"),
        master_port=int(dist_env("MASTER_PORT")),
        timeout_s=20,
        node=f"node-{dist_env('RANK')}",
    )
    logging.getLogger("torsh_distributed.parallel.mesh.mesh").addHandler(Keep())
    Mesh(MeshConfig(tp=2))
    with pytest.raises(InvalidArgument, match="but the world has 2 ranks"):
        Mesh(MeshLayout(MeshConfig(dp=4)))
    process_group.destroy_process_group()
    return lines


def dist_env(name: str) -> str:
    return os.environ[name]


def test_a_tensor_group_that_crosses_nodes_is_warned_of(world: World) -> None:
    for lines in world.run(warned_of_crossing, backend=None):
        [line] = lines
        assert "mesh.tp 2: 1 tensor-parallel groups span more than one node, such as ranks 0, 1" in line
