"""Compressed data parallelism on a GPU gives what it gives on the CPU: streams wait for each other as they should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.bed.world import World
from tests.parallel.example_models import SMALL, backward, build, data
from torsh_distributed.parallel.data.ddp import Compression, DistributedDataParallel
from torsh_distributed.plan import CompressConfig

METHODS = ["none", "bf16", "int8", "sign", "topk:0.05", "powersgd:2"]


def train(device: str, compression: Compression) -> Tensor:
    """The parameters after eight steps, on the CPU."""
    model = DistributedDataParallel(build().to(device), SMALL, compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    points, targets = (tensor.to(device) for tensor in data())
    for step in range(8):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(points), targets)
        if step < 6:
            backward(loss)
        else:
            model.zero_grad()
            with model.no_sync():
                backward(nn.functional.mse_loss(model(points), targets))
            model.sync_gradients()
        optimizer.step()
    assert model.check_gradient_consistency() == []
    return torch.cat([param.detach().cpu().flatten() for param in model.parameters()])


def on_both(method: str) -> float:
    config = CompressConfig(method=method, warmup_steps=1, skip_below_numel=100)
    here, there = train("cpu", config), train("cuda", config)
    return float((here - there).norm() / here.norm())


@pytest.mark.needs_cuda
@pytest.mark.parametrize("method", METHODS)
def test_training_on_a_gpu_ends_where_it_ends_on_the_cpu(world: World, method: str) -> None:
    [distance] = world.run(on_both, method, num_ranks=1, backend="cpu:gloo,cuda:nccl", timeout_s=100)
    assert distance < 1e-3
