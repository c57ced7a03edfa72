"""Groups by name: members in any order, clear refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.moves import all_gather
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.manager import CommunicationGroup, GroupManager
from torsh_distributed.errors import InvalidArgument, ProcessGroupNotFound, RankOutOfBounds


def members_by_asking(group: CommunicationGroup) -> list[int]:
    """Not what the record says: what a collective on the group brings back."""
    return [int(value) for value in all_gather(torch.tensor(dist.get_rank()), group=group.handle)]


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
    groups.create_group("pair", range(2))
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


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("again", InvalidArgument, "already"),
        ("twice", InvalidArgument, "each once"),
        ("empty", InvalidArgument, "at least one rank"),
        ("outside", RankOutOfBounds, "outside the world of 2"),
        ("unknown", ProcessGroupNotFound, "pair"),
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
