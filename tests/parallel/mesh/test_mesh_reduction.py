"""The gradient norm over ranks equals that of one process, for whole, sharded and divided gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.bed.world import World
from torsh_distributed.parallel.data.data_strategy import DataParallel
from torsh_distributed.parallel.mesh.mesh_reduction import HeldGradients, clip_to_norm, grad_norm, held_by_placement
from torsh_distributed.plan import DdpConfig

CPU = torch.device("cpu")


def whole() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in ((7, 3), (5,), ())]


def norms_over_ranks() -> list[float]:
    world = dist.group.WORLD
    assert world is not None
    mesh = init_device_mesh("cpu", (world.size(),))
    first, second, third = whole()
    shard = distribute_tensor(first, mesh, [Shard(0)])
    mixed = [shard, second, third]
    norm = grad_norm(held_by_placement(mixed), CPU)
    copies = grad_norm([HeldGradients([first, second, third], (world,), num_copies=world.size())], CPU)
    empty = grad_norm([HeldGradients([first] if world.rank() == 0 else [], (world,)), HeldGradients([second])], CPU)
    clip_to_norm(mixed, norm, 1.0)
    clipped = grad_norm(held_by_placement(mixed), CPU)
    shard.to_local().fill_(float("nan") if world.rank() == 1 else 0.0)
    return [float(value) for value in (norm, copies, empty, clipped, grad_norm(held_by_placement(mixed), CPU))]


def test_every_rank_gets_the_norm_of_the_whole_gradient(world: World) -> None:
    expected = torch.cat([one.flatten() for one in whole()]).norm().item()
    partial = torch.cat([one.flatten() for one in whole()[:2]]).norm().item()
    for norm, copies, empty, clipped, bad in world.run(norms_over_ranks, num_ranks=2):
        assert [norm, copies, empty, clipped] == pytest.approx([expected, expected, partial, 1.0], rel=1e-5)
        assert math.isnan(bad)


def test_sparse_gradients_count_each_element_once() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert table.weight.grad is not None
    norm = grad_norm([HeldGradients([table.weight.grad])], CPU)
    assert norm == pytest.approx(math.sqrt(2 * 2**2 + 2 * 1**2))
    clip_to_norm([table.weight.grad], norm, 1.0)
    assert table.weight.grad.to_dense().norm() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_narrow_and_wide_gradients_are_measured_in_enough_precision(dtype: torch.dtype) -> None:
    norm = grad_norm([HeldGradients([torch.ones(4096, dtype=dtype)])], CPU)
    assert (norm.dtype, norm.item()) == (torch.float32, 64.0)


def norm_of_large_replicas() -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 3))
    strategy = DataParallel(model, DdpConfig())
    torch.manual_seed(dist.get_rank())
    strategy.model(torch.randn(4, 1024)).sum().backward()
    expected = (
        torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]).double().norm()
    )
    return float(strategy.clip_grad_norm(None)), float(expected)


def test_ranks_that_share_memory_divide_the_work(world: World) -> None:
    for norm, expected in world.run(norm_of_large_replicas, num_ranks=3, backend="shm"):
        assert norm == pytest.approx(expected, rel=1e-4)
