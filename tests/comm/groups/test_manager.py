"""Groups by name: two-axis layouts, uneven nodes, clear refusals."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.moves import all_gather
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.manager import CommunicationGroup, GroupManager, GroupType
from torsh_distributed.errors import InvalidArgument, ProcessGroupNotFound, RankOutOfBounds


def members_by_asking(group: CommunicationGroup) -> list[int]:
    """Not what the record says: what a collective on the group brings back."""
    return [int(value) for value in all_gather(torch.tensor(dist.get_rank()), group=group.handle)]


def two_axes() -> tuple[list[int], list[int], list[str]]:
    groups = GroupManager()
    dp, mp = groups.create_standard_groups(dp=2, mp=2)
    return members_by_asking(dp), members_by_asking(mp), [group.name for group in groups.list_groups()]


def test_a_two_by_two_layout_has_all_four_groups(world: World) -> None:
    names = ["dp_0", "dp_1", "mp_0", "mp_1"]
    assert world.run(two_axes, num_ranks=4) == [
        ([0, 2], [0, 1], names),
        ([1, 3], [0, 1], names),
        ([0, 2], [2, 3], names),
        ([1, 3], [2, 3], names),
    ]


def uneven_nodes() -> tuple[list[int], list[int], list[GroupType]]:
    rank = int(os.environ["RANK"])
    process_group.start_world(
        "gloo",
        rank=rank,
        world_size=3,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=20,
        node="first" if rank != 1 else "second",
    )
    groups = GroupManager()
    node, across = groups.create_hierarchical_groups()
    found = members_by_asking(node), members_by_asking(across), [group.kind for group in groups.list_groups()]
    groups.close()
    process_group.destroy_process_group()
    return found


def test_nodes_are_where_the_ranks_met_also_when_uneven(world: World) -> None:
    results = world.run(uneven_nodes, num_ranks=3, backend=None)
    assert [result[0] for result in results] == [[0, 2], [1], [0, 2]]
    assert [result[1] for result in results] == [[0, 1], [0, 1], [2]]
    assert results[0][2] == [GroupType.INTRA_NODE] * 2 + [GroupType.INTER_NODE] * 2


def a_group_without_me() -> tuple[bool, list[int] | None, list[str]]:
    groups = GroupManager()
    group = groups.create_group("reversed", [2, 1])
    found = members_by_asking(group) if group.is_member else None
    assert group.to_world_rank(0) == 2
    assert group.to_group_rank(1) == 1
    groups.remove_group("reversed")
    return group.is_member, found, [one.name for one in groups.list_groups()]


def test_a_rank_may_create_a_group_it_is_not_in(world: World) -> None:
    [outside, *inside] = world.run(a_group_without_me, num_ranks=3)
    assert outside == (False, None, [])
    assert all(is_member and sorted(found) == [1, 2] for is_member, found, _ in inside)


def refused(case: str) -> None:
    groups = GroupManager()
    groups.create_group_from_range("pair", 0, 2)
    dist.barrier()  # all are connected before one leaves with an error
    if case == "again":
        groups.create_group("pair", [0])
    elif case == "twice":
        groups.create_group("double", [0, 0])
    elif case == "empty":
        groups.create_group("none", [])
    elif case == "outside":
        groups.create_group("far", [0, 5])
    elif case == "unknown":
        groups.group("pear")
    elif case == "product":
        groups.create_standard_groups(dp=2, mp=2)
    elif case == "division":
        groups.create_hierarchical_groups(3)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("again", InvalidArgument, "already"),
        ("twice", InvalidArgument, "each once"),
        ("empty", InvalidArgument, "at least one rank"),
        ("outside", RankOutOfBounds, "outside the world of 2"),
        ("unknown", ProcessGroupNotFound, "pair"),
        ("product", InvalidArgument, "dp 2 × mp 2 = 4, but the world has 2 ranks"),
        ("division", InvalidArgument, "do not divide the world of 2"),
    ],
)
def test_mistakes_are_refused_on_every_rank(world: World, case: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        world.run(refused, case)


def use_a_foreign_group() -> None:
    group = GroupManager().create_group("one", [0])
    if dist.get_rank() == 1:
        all_reduce(torch.zeros(1), group=dist.GroupMember.NON_GROUP_MEMBER if group.handle is None else group.handle)


def test_a_collective_on_a_group_of_others_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="not a member of the group"):
        world.run(use_a_foreign_group)
