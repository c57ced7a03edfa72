"""Rows of a whole tensor that a rank reads, where a piece of it is sharded further."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typing_extensions import override

from tests.bed.world import World
from torsh_distributed.parallel.weights.model_weights import HeldParts, Rows


class TwoRuns(HeldParts):
    """A piece of two runs of rows, as of fused layers that are cut, or of experts."""

    @override
    def runs(self, name: str, shape: object) -> Rows | None:
        return None if name == "columns" else [(1, 4), (6, 8)]


def rows_here() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    five = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    assert TwoRuns().rows("one", (9, 2), five) == [[(1, 4)], [(6, 8)]][rank]
    assert TwoRuns().rows("columns", (9, 2), five) is None
    assert TwoRuns().rows("one", (9, 2), torch.zeros(5, 2)) == [(1, 4), (6, 8)]
    across = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)])
    assert TwoRuns().rows("one", (9, 2), across) is None, "a shard by columns is cut out of the whole"
    four = distribute_tensor(nn.Parameter(torch.zeros(4, 2)), mesh, [Shard(0)])
    assert HeldParts().rows("one", (4, 2), four) == [[(0, 2)], [(2, 4)]][rank]
    single = distribute_tensor(torch.zeros(1), mesh, [Shard(0)])
    assert HeldParts().rows("one", (1,), single) == [[(0, 1)], []][rank]


def test_a_shard_of_a_piece_is_rows_of_its_runs(world: World) -> None:
    world.run(rows_here)
