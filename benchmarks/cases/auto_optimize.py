"""A job that begins badly, with tiny buckets and many passes, and changes its plan while it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

import torsh_distributed as td
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World

_SECTIONS = {
    "buckets of 10 kB": {"dp": 2, "ddp": {"max_bucket_size_mb": 0.01, "min_bucket_size_mb": 0.01}},
    "shards gathered when needed": {"dp": 1, "shard": 2},
}
_MEASURED = 20


def _trained(name: str, how: str, window: int) -> tuple[list[float], list[float], list[str]]:
    """Losses, seconds of each step and what was tried; runs on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training = {"batch_size": 16, "auto_optimize": how, "auto_optimize_window": window}
    plan = td.Plan(training=training, **_SECTIONS[name])  # type: ignore[arg-type]  # sections as keys
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(24)]
    model = nn.Sequential(*layers, nn.Linear(256, 1))
    engine = td.parallelize(model, partial(torch.optim.SGD, lr=0.01), plan, loss_fn=nn.functional.mse_loss)
    source = torch.Generator().manual_seed(td.rank())
    losses, times = [], []
    for _ in range(9 * (window + 3) + _MEASURED):
        rows = torch.randn(8, 256, generator=source)
        started = time.perf_counter()
        losses.append(engine.step((rows, rows[:, :1])))
        times.append(time.perf_counter() - started)
    auto = engine.auto_optimization
    told = (
        [] if auto is None else [f"{one.change} ({'kept' if one.is_kept else 'taken back'})" for one in auto.attempts]
    )
    if auto is not None:
        auto.close()
    return losses, times, told


def _rows(budget: Budget) -> Iterator[Row | Note]:
    rounds, window = (1, 5) if budget.is_quick else (3, 15)
    world = World()
    try:
        for name in _SECTIONS:
            begun, ended, tried = [], [], []
            for _ in range(rounds):
                losses, times, told = world.run(_trained, name, "exact", window, backend="shm", timeout_s=300)[0]
                plain = world.run(_trained, name, "off", window, backend="shm", timeout_s=300)[0][0]
                assert losses == plain, "what is tried leaves losses as they are"
                begun.append(statistics.median(times[3 : 3 + _MEASURED]))
                ended.append(statistics.median(times[-_MEASURED:]))
                tried += told
            rivals = {"as it began": Measurement.of(begun)}
            yield Row(name=f"a step, {name}", unit=Unit.SECONDS, ours=Measurement.of(ended), rivals=rivals)
            yield Note(text=f"{name}: {', '.join(dict.fromkeys(tried)) or 'nothing was tried'}")
    finally:
        world.close()


CASE = Case(
    title="A job that optimizes itself",
    about="""24 × Linear 256 (1.6 M parameters), batch 16, SGD, two ranks with one thread each, on shm. The plan begins
    badly and has `training.auto_optimize = "exact"`: ours is a step at the end of the job, beside one at its begin, in
    the same job. Every loss equals that of a job that changes nothing.""",
    rows=_rows,
)
