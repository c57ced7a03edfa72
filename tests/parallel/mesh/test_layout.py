"""The arithmetic of a mesh, for any world."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_distributed.errors import InvalidArgument, RankOutOfBounds
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.plan import MeshConfig

AXES = ("dp", "shard", "tp", "pp", "ep", "cp")


@st.composite
def layouts(draw: st.DrawFn) -> MeshLayout:
    degrees = {axis: draw(st.integers(1, 3 if axis in ("dp", "tp") else 2)) for axis in AXES}
    return MeshLayout(MeshConfig(**degrees))


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
