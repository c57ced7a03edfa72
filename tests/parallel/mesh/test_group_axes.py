from __future__ import annotations

import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.parallel.mesh.group_axes import GroupAxes
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.plan import MeshConfig


def name_groups() -> list[str | None]:
    axis_of = GroupAxes(MeshLayout(MeshConfig(dp=2, tp=2)))
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [0])]
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    world = dist.group.WORLD
    assert world is not None
    too_small = GroupAxes(MeshLayout(MeshConfig(dp=2)))
    assert too_small(world.group_name) is None, "the world has changed"
    return [axis_of(group.group_name) for group in (*mine, world)] + [axis_of("nobody's")]


def test_a_group_belongs_to_the_axes_along_which_its_ranks_differ(world: World) -> None:
    first, second, third, fourth = world.run(name_groups, num_ranks=4)
    assert first == ["tp", "dp", "dp×tp", None, "dp×tp", None]
    assert second == third == ["tp", "dp", "dp×tp", None]
    assert fourth == ["tp", "dp", "dp×tp", "dp×tp", None]
