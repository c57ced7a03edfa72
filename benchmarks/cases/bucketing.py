"""Collectives in a training step: with buckets and without, and by torch's DDP."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.plan import DdpConfig

_LAYERS, _WIDTH = 50, 256
_WARM_UP = 3
"""Steps that are not counted: DDP rebuilds its buckets in the first ones."""
_OF_A_BACKEND = re.compile(r"(gloo|shm|torsh):")
"""Titles of c10d's operations in a profile."""


def _wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    if kind == "torch DDP":
        return TorchDDP(layers)
    return DistributedDataParallel(layers, DdpConfig(bucketing=kind == "buckets"))


def _counted(kind: str, num_steps: int) -> list[float]:
    """The collectives of each step, as the profiler of this rank saw them; runs on every rank."""
    model, batch, counts = _wrapped(kind), torch.randn(8, _WIDTH), []
    for step in range(_WARM_UP + num_steps):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(batch).square().mean().backward()
        model.zero_grad()
        if step >= _WARM_UP:
            counts.append(float(sum(bool(_OF_A_BACKEND.match(event.name)) for event in seen.events() or ())))
    return counts


def _rows(budget: Budget) -> Iterator[Row | Note]:
    world = World()
    try:
        for backend in ("gloo", "shm"):
            found = {
                kind: Measurement.of(world.run(_counted, kind, 3, backend=backend)[0])
                for kind in ("buckets", "no buckets", "torch DDP")
            }
            ours = found.pop("buckets")
            yield Row(name=f"collectives in a step, {backend}", unit=Unit.COUNT, ours=ours, rivals=found)
    finally:
        world.close()


CASE = Case(
    title="Bucketing: collectives in a step",
    about="""50 linear layers of width 256: 100 gradients, 3.3 M parameters, two ranks. Counted by torch's profiler in
    forward and backward of a step, on the first rank. Ours with its defaults, the same with `ddp.bucketing = false`,
    and torch's DDP with its defaults.""",
    rows=_rows,
)
