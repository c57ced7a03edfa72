"""What torch builds on process groups runs on shm as on gloo: same program, same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.bed.world import World
from tests.comm.backends.ranks import on_shm


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def train(net: nn.Module, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(net: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in net.parameters()]


def data_parallel() -> Any:
    # Small buckets: several reductions are on their way during one backward.
    net = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    return train(net), weights(net)


def data_parallel_with_hook() -> Any:
    net = DistributedDataParallel(model())

    def halve(state, bucket):  # torch compares the annotations, which are text in this file
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())

    net.register_comm_hook(None, halve)
    return train(net), weights(net)


def data_parallel_sparse() -> Any:
    torch.manual_seed(3)
    table = nn.EmbeddingBag(50, 8, sparse=True)
    net = DistributedDataParallel(table)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        indices = torch.arange(6).view(2, 3) + step + 10 * dist.get_rank()
        optimizer.zero_grad()
        net(indices).square().sum().backward()
        optimizer.step()
    return weights(net)


def sharded() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net), weights(net)


def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(step)  # tensor parallelism: every rank has the same batch
        loss = nn.functional.mse_loss(net(torch.randn(8, 16)), torch.randn(8, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(net)


def distributed_tensors() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    whole = torch.randn(10, 6)  # does not divide evenly by 3 or 4
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = (rows @ rows.t()).redistribute(mesh, [Replicate()]).to_local()
    return columns.full_tensor(), product, rows.sum().full_tensor()


def pipeline() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    torch.manual_seed(12)
    inputs, targets = torch.randn(16, 16), torch.randn(16, 16)
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step()
    grads = [parameter.grad for parameter in layers[rank].parameters()]
    return [loss.item() for loss in losses], grads


def functional_collectives() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group()
    tensor = torch.arange(4.0 * size) + rank
    return [
        functional.wait_tensor(functional.all_reduce(tensor, "sum", group)),
        functional.wait_tensor(functional.all_gather_tensor(tensor, 0, group)),
        functional.wait_tensor(functional.reduce_scatter_tensor(tensor, "avg", 0, group)),
        functional.wait_tensor(functional.all_to_all_single(tensor, None, None, group)),
        functional.wait_tensor(functional.broadcast(tensor, 0, group)),
        *map(functional.wait_tensor, functional.all_reduce_coalesced([tensor, tensor * 2], "max", group)),
        *map(functional.wait_tensor, functional.all_gather_into_tensor_coalesced([tensor, tensor * 2], group)),
    ]


def sub_groups() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for ranks in ([0], [0, 1], list(range(size)), [size - 1, 0], list(range(1, size))):
        members = sorted(set(ranks))
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            found.append(tensor.item())
            outputs = [torch.empty(1) for _ in members]
            dist.all_gather(outputs, torch.tensor([float(rank)]), group=group)
            found.append([output.item() for output in outputs])
            dist.broadcast(tensor, src=members[-1], group=group)
            found.append(tensor.item())
    dist.barrier()
    return found


CASES: list[Callable[[], Any]] = [
    data_parallel,
    data_parallel_with_hook,
    data_parallel_sparse,
    sharded,
    tensor_parallel,
    distributed_tensors,
    pipeline,
    functional_collectives,
    sub_groups,
]


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        # The two add up ranks in different orders; a few steps of training carry the last bit further.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_shm_gives_what_gloo_gives(world: World, tmp_path: Path, num_ranks: int, case: Callable[[], Any]) -> None:
    # Two worlds, not one after the other in the same processes: DTensor of torch 2.11 remembers the first one's groups.
    on_gloo = world.run(case, num_ranks=num_ranks, timeout_s=60)
    ours = world.run(on_shm, tmp_path, "auto", case, num_ranks=num_ranks, backend=None, timeout_s=60)
    for expected, actual in zip(on_gloo, ours, strict=True):
        assert_equal(actual, expected)


def save_and_load(folder: Path) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = fully_shard(model(), mesh=mesh)
    train(net)
    kept = weights(net)
    state = {"net": net.state_dict()}
    dcp.save(state, checkpoint_id=str(folder))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    dcp.load(state, checkpoint_id=str(folder))
    net.load_state_dict(state["net"])
    assert_equal(weights(net), kept)
    return kept


def test_checkpoints_are_saved_and_loaded(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    kept = world.run(on_shm, tmp_path, "auto", save_and_load, folder, backend=None, timeout_s=60)
    assert_equal(kept[0], kept[1])
