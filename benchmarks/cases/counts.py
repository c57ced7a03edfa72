"""What a training step does, counted: collectives, their bytes, operations of torch, calls of this library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import torsh_distributed
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from tests.parallel.reference import BATCH, batches, build
from torsh_distributed.native import CODEC_KERNELS, SHM_CORE, load
from torsh_distributed.plan import Plan
from torsh_distributed.train import EfficiencyMeter, Engine, parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

PLANS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "replicas": {"mesh": {"dp": 2}},
    "replicas, top-k": {"mesh": {"dp": 2}, "compress": {"method": "topk:0.1"}},
    "replicas, two passes": {"mesh": {"dp": 2}, "training": {"gradient_accumulation": 2}},
    "shards": {"mesh": {"shard": 2}},
    "tensor parallel": {"mesh": {"tp": 2}},
    "pipeline": {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}},
}
_WARM_UP = 4
"""Steps that are not counted: in the first ones buckets are packed and the model is checked."""
_STEPS = 5
_LIBRARY = Path(torsh_distributed.__file__).parent
_WAITS = (str(_LIBRARY / "comm"), str(_LIBRARY / "events"))
"""How often these are called depends on how long a rank waits."""


def counted(name: str) -> dict[str, list[float]]:
    """What each step did on this rank; runs on every rank."""
    engine = _engine_of(Plan.from_dict(PLANS[name]))
    given = iter(engine.batches(batches(100)))
    for batch in islice(given, _WARM_UP):
        engine.step(batch)
    with EfficiencyMeter(engine) as meter:
        for batch in islice(given, _STEPS):
            engine.step(batch)
    axes = meter.report().mean.axes.values()
    inside = [_work_of(engine, batch) for batch in islice(given, _STEPS)]
    return {
        "collectives and messages": [sum(axis.num_operations for axis in axes)],
        "bytes they carry": [sum(axis.num_bytes for axis in axes)],
        "operations of torch": [float(operations) for operations, _ in inside],
        "bytes allocated": [float(allocated) for _, allocated in inside],
        "calls of this library": [_calls_of(partial(engine.step, batch)) for batch in islice(given, _STEPS)],
    }


def _engine_of(plan: Plan) -> Engine:
    training = plan.training.replace(steps=100, batch_size=BATCH)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    model = build("gpt", num_layers=2)
    return parallelize(model, optimizer, plan.replace(training=training), loss_fn=next_character_loss)


def _work_of(engine: Engine, batch: object) -> tuple[int, int]:
    """The operations of torch in a step, and the bytes that they allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine.step(batch)
    found = seen.events() or ()
    operations = sum(event.name.startswith("aten::") for event in found)
    return operations, sum(max(0, event.self_cpu_memory_usage) for event in found)


def _calls_of(step: Callable[[], object]) -> float:
    """Calls of functions of this library by the thread that trains; those that Python makes of expressions aside."""
    count = 0

    def take(frame: FrameType, what: str, _: object) -> None:
        nonlocal count
        code = frame.f_code
        if what == "call" and code.co_filename.startswith(str(_LIBRARY)) and not code.co_filename.startswith(_WAITS):
            count += not code.co_name.startswith("<")

    sys.setprofile(take)
    try:
        step()
    finally:
        sys.setprofile(None)
    return float(count)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if load(SHM_CORE) is None or load(CODEC_KERNELS) is None:
        yield Note(
            text="Without the compiled parts other operations do the work: `python -m torsh_distributed.native`."
        )
        return
    world = World()
    try:
        for name in list(PLANS)[: 2 if budget.is_quick else None]:
            ranks = world.run(counted, name, num_ranks=2, backend="torsh", timeout_s=300)
            for what in ranks[0]:
                # Of the rank that does most: a pipeline's stages differ.
                most = max((Measurement.of(counts[what]) for counts in ranks), key=lambda count: count.median)
                yield Row(name=f"{name}: {what}", unit=Unit.COUNT, ours=most)
    finally:
        world.close()


CASE = Case(
    title="Counts: what a training step does",
    about="""A GPT of two layers, batches of 8, AdamW, two ranks on torsh: `Engine.step` on the rank that does
    most. Collectives and the bytes of their tensors as the process groups see them, operations and allocations as
    torch's profiler does, and calls of this library's functions by the training thread, without `comm` and `events`,
    where waiting makes calls. The numbers depend on the version of torch, but not on the machine or its load: `make
    counts` and CI hold the code against them.""",
    rows=_rows,
)
