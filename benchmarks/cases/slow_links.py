"""A training step over slow links: our compressed gradients against torch's default DDP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed import needs
from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed import CompressConfig, DdpConfig
from torsh_distributed.parallel.data.ddp import DistributedDataParallel

_METHODS = ("none", "bf16", "int8", "natural", "nbit:4", "sign", "ternary", "topk:0.01", "randomk:0.01", "powersgd:4")
_TORCH = "torch DDP"


def _model(method: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    if method == _TORCH:
        return TorchDDP(model, gradient_as_bucket_view=True)
    config = CompressConfig(method=method, warmup_steps=2)  # DDP rebuilds its buckets after the first step
    bucket = DdpConfig(gradient_as_bucket_view=True)
    return DistributedDataParallel(model, bucket, compression=None if method == "none" else config)


def _step_s(method: str, num_steps: int, num_first: int) -> float:
    """Median seconds of a step on the slowest rank, after `num_first` steps; runs on every rank."""
    torch.set_num_threads(1)
    model = _model(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 1024)
    times = []
    for step in range(num_first + num_steps):
        dist.barrier()
        started = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= num_first:
            times.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    world = World()
    methods = ("powersgd:4",) if budget.is_quick else _METHODS
    try:
        missing = needs.netns()
        if missing:
            yield Note(text=f"Links are not measured here: {missing}.")
        for rate_gbps in () if missing else (1.0,) if budget.is_quick else (0.1, 1.0):
            yield from _over_a_link(world, methods, rate_gbps, budget)
        yield from _in_memory(world, budget)
    finally:
        world.close()


def _over_a_link(world: World, methods: tuple[str, ...], rate_gbps: float, budget: Budget) -> Iterator[Row]:
    num_steps, num_first = (2, 3) if budget.is_quick else (10, 4)
    with Lab() as lab:
        hosts = lab.hosts(2)
        for host in hosts:
            host.limit(rate_gbps)

        def measure(method: str, backend: str, *, first: int = num_first) -> Measurement:
            seconds = world.run(_step_s, method, num_steps, first, backend=backend, hosts=hosts, timeout_s=300)
            return Measurement.of(seconds)

        theirs = measure(_TORCH, "gloo")
        for method in methods:
            yield Row(
                name=f"{rate_gbps:g} Gbit/s, {method}",
                unit=Unit.SECONDS,
                ours=measure(method, "torsh"),
                rivals={"torch DDP, gloo": theirs},
            )
        yield Row(  # it tries at most three methods twice before it decides
            name=f"{rate_gbps:g} Gbit/s, auto",
            unit=Unit.SECONDS,
            ours=measure("auto", "torsh", first=num_first + 6),
            rivals={"torch DDP, gloo": theirs},
        )


def _in_memory(world: World, budget: Budget) -> Iterator[Row]:
    rounds, num_steps = (1, 3) if budget.is_quick else (5, 30)
    found = [
        {method: world.run(_step_s, method, num_steps, 10, backend="shm")[0] for method in ("auto", "none")}
        for _ in range(rounds)
    ]
    yield Row(
        name="shared memory, auto",
        unit=Unit.SECONDS,
        ours=Measurement.of([one["auto"] for one in found]),
        rivals={"ours, none": Measurement.of([one["none"] for one in found])},
    )


CASE = Case(
    title="A training step over slow links",
    about="""8 × Linear 1024 (8.4 M parameters, 33.6 MB of gradients), batch 8, SGD, two ranks with one thread each,
    gradients as views of the buckets on both sides. Hosts are network namespaces joined by a bridge, each link limited
    with a token bucket; torch's DDP sends fp32 over gloo. Ours compresses with error feedback over torsh. The last row
    shows that choosing costs nothing when compression does not help.""",
    rows=_rows,
)
