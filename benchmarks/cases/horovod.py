"""Horovod's surface: a step through its optimizer against our DDP, and a burst of small operations."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

import torsh_distributed.migrate.horovod as hvd
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.parallel.data.ddp import DistributedDataParallel

_NUM_SMALL = 100


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


def _horovod_step(width: int) -> Callable[[], None]:
    model = _model(width)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    return _step(model, optimizer, width)


def _ddp_step(width: int) -> Callable[[], None]:
    model = DistributedDataParallel(_model(width))
    return _step(model, torch.optim.SGD(model.parameters(), lr=1e-3), width)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Callable[[], None]:
    batch = torch.randn(32, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_turns(width: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Median seconds of a step of each kind in every round, both in the same processes; runs on every rank."""
    hvd.init()
    sides = {"ours": _horovod_step(width), "ddp": _ddp_step(width)}
    for step in sides.values():
        for _ in range(4):
            step()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name in sorted(sides, reverse=bool(round_ % 2)):
            times = []
            for _ in range(steps):
                hvd.barrier()
                started = time.perf_counter()
                sides[name]()
                times.append(time.perf_counter() - started)
            found[name].append(statistics.median(times))
    return found


def _bursts(rounds: int) -> dict[str, list[float]]:
    """Seconds from the first submission to the last result of many small operations; runs on every rank."""
    hvd.init()
    tensors = [torch.ones(16) for _ in range(_NUM_SMALL)]
    names = [f"small.{index}" for index in range(_NUM_SMALL)]
    # A group of the script's own: under Horovod torch has none.
    meeting = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/gloo", rank=hvd.rank(), world_size=hvd.size())

    def named() -> None:
        handles = [
            hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def one_by_one() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    found: dict[str, list[float]] = {"ours": [], "gloo": []}
    for round_ in range(rounds + 2):
        for name, burst in (("ours", named), ("gloo", one_by_one)):
            hvd.barrier()
            started = time.perf_counter()
            burst()
            if round_ >= 2:
                found[name].append(time.perf_counter() - started)
    dist.destroy_process_group()
    hvd.barrier()  # a group that is being destroyed still opens its file
    if hvd.rank() == 0:
        shutil.rmtree(meeting)
    return found


def _rows(budget: Budget) -> Iterator[Row | Note]:
    rounds, steps = (2, 3) if budget.is_quick else (10, 20)
    world = World()
    try:
        for width in (1024,) if budget.is_quick else (512, 1024):
            found = world.run(_in_turns, width, rounds, steps, backend=None, timeout_s=300)[0]
            yield Row(
                name=f"a step, {8 * width * (width + 1) / 1e6:.1f} M parameters",
                unit=Unit.SECONDS,
                ours=Measurement.of(found["ours"]),
                rivals={"our DDP": Measurement.of(found["ddp"])},
            )
        found = world.run(_bursts, 5 if budget.is_quick else 200, backend=None, timeout_s=120)[0]
        yield Row(
            name=f"{_NUM_SMALL} small all-reduces at once",
            unit=Unit.SECONDS,
            ours=Measurement.of(found["ours"]),
            rivals={"gloo, one by one": Measurement.of(found["gloo"])},
        )
    finally:
        world.close()


CASE = Case(
    title="Horovod's surface",
    about="""Two ranks with one thread each, on one node. A step (8 linear layers, batch 32, SGD) through
    `hvd.DistributedOptimizer` against our own DDP, in the same processes, in turns. 100 all-reduces of 16 numbers,
    submitted at once by name through the negotiation, against as many asynchronous ones of torch on gloo.""",
    rows=_rows,
)
