"""What doubling the world costs: one to eight ranks on one node."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit, Workload
from tests.bed.world import World
from torsh_distributed.comm.measurement import time_on_all_ranks
from torsh_distributed.parallel.data.ddp import DistributedDataParallel

_SIZES = (1, 2, 4, 8)
_WIDTH = 256
_MOST = 4.0
"""A world twice as large may take so many times as long: twice the work for each core, and as much again to meet."""


def _measured(is_ours: bool, num_samples: int) -> dict[str, list[float]]:
    """Seconds of a sum of 1 MB and of a training step, on the slowest rank; runs on every rank."""
    buffer = torch.ones(2**18)
    work: dict[str, Workload] = {
        "all-reduce, 1 MB": lambda: dist.all_reduce(buffer),
        "a step of DDP, 0.5 M parameters": _step(is_ours),
    }
    for call in work.values():
        time_on_all_ranks(call, 3)
    return {name: [time_on_all_ranks(call, 5) / 5 for _ in range(num_samples)] for name, call in work.items()}


def _step(is_ours: bool) -> Workload:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(8)))
    model = DistributedDataParallel(layers) if is_ours else TorchDDP(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, _WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _rows(budget: Budget) -> Iterator[Row | Note]:
    sizes = _SIZES[:2] if budget.is_quick else _SIZES
    rounds = 1 if budget.is_quick else 3
    found: dict[tuple[str, int, str], list[float]] = {}
    world = World()
    try:
        for _ in range(rounds):
            for size in sizes:
                for who, backend in (("ours", "shm"), ("torch, gloo", "gloo")):
                    times = world.run(
                        _measured, who == "ours", budget.num_samples, num_ranks=size, backend=backend, timeout_s=300
                    )[0]
                    for name, seconds in times.items():
                        found.setdefault((name, size, who), []).extend(seconds)
    finally:
        world.close()
    names = list(dict.fromkeys(name for name, _, _ in found))
    for name in names:
        for size in sizes:
            ours, theirs = (Measurement.of(found[name, size, who]) for who in ("ours", "torch, gloo"))
            plural = "s" if size > 1 else ""
            yield Row(name=f"{name}, {size} rank{plural}", unit=Unit.SECONDS, ours=ours, rivals={"torch, gloo": theirs})
    for name in names:
        medians = [statistics.median(found[name, size, "ours"]) for size in sizes]
        # One rank has nobody to meet: its sum is no work at all, and no measure of a world.
        first = 1 if name.startswith("all-reduce") else 0
        steps = [later / before for before, later in zip(medians[first:], medians[first + 1 :], strict=False)]
        if steps:
            shown = ", ".join(f"{factor:.1f}" for factor in steps)
            text = f"{name}: doubling from {sizes[first]} on takes {shown} times as long; {_MOST:g} is the limit."
            yield Note(text=text)


CASE = Case(
    title="Doubling the world",
    about="""A sum of 1 MB and a training step (eight linear layers of width 256, batch 32 for each rank, one
    thread each) on one to eight ranks of one node, ours on shm, torch's DDP on gloo, in turns. With more ranks than
    cores the work of a step doubles with them.""",
    rows=_rows,
)
