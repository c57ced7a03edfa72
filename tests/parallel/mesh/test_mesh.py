"""Real groups of a mesh reduce over exactly the ranks they should."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typing_extensions import override

from tests.bed.world import World
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import BackendNotInitialized, InvalidArgument
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.plan import MeshConfig


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


def test_a_mesh_needs_the_process_group() -> None:
    with pytest.raises(BackendNotInitialized):
        Mesh(MeshConfig(dp=2))
