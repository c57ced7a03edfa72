"""A training step of an 8.4 M-parameter MLP under torch's own DDP and FSDP2: on shm against gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.parallel.data.ddp import DistributedDataParallel as OurDDP
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.plan import FsdpConfig

_VIEWS = "DDP, gradients as views of the buckets"
_RIVALS = {"our DDP": "DDP", "our FSDP": "FSDP2"}
"""What ours is compared with on gloo; everything else is compared with itself."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))


def _wrapped(kind: str) -> nn.Module:
    model = _model()
    if kind == "our DDP":
        return OurDDP(model)
    if kind == "our FSDP":
        return FullyShardedDataParallel(model, FsdpConfig(strategy="full_shard"))
    if kind.startswith("DDP"):
        return DistributedDataParallel(model, gradient_as_bucket_view=kind == _VIEWS)
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def _step_s(kind: str, num_steps: int) -> float:
    """Median seconds of a step on the slowest rank; runs on every rank."""
    model = _wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 1024)
    times = []
    for step in range(num_steps + 3):
        dist.barrier()
        started = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3:
            times.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    rounds, num_steps = (1, 3) if budget.is_quick else (5, 30)
    world = World()
    try:
        for kind in ("our DDP", "DDP", _VIEWS, "our FSDP", "FSDP2", "no communication"):
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(world.run(_step_s, kind, num_steps, backend="shm", timeout_s=120)[0])
                rival = _RIVALS.get(kind, kind)
                theirs.append(world.run(_step_s, rival, num_steps, backend="gloo", timeout_s=120)[0])
            rivals = {"gloo": Measurement.of(theirs)}
            yield Row(name=f"{kind}, 2 ranks", unit=Unit.SECONDS, ours=Measurement.of(ours), rivals=rivals)
    finally:
        world.close()


CASE = Case(
    title="A training step on one node",
    about="""8 × Linear 1024 (8.4 M parameters), batch 8, SGD, two ranks with one thread each. Our DDP and
    FSDP on shm against torch's on gloo, each with its defaults; and torch's own on both, where only the backend
    differs. With gradients as views of the buckets, our default, nothing is copied out of them. The row without
    communication is the same step unwrapped: the limit for all.""",
    rows=_rows,
)
