"""`torsh bench monitor`: what recording costs the training thread, beside what others record with."""

from __future__ import annotations

import collections
import gc
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from torsh_distributed.cli.bench.rivals.contest import SAMPLE_S, show_rows
from torsh_distributed.cli.bench.rivals.side_by_side import (
    OURS,
    Row,
    RowUnit,
    SampleBudget,
    SampleMedian,
    Workload,
    compare,
)
from torsh_distributed.events import JsonlSink, StepEvent, emit, subscribe
from torsh_distributed.observe.metrics.rank_metrics import RankMetrics

_BATCH = 2_000
_NUM_SINGLE = 20_000

app = typer.Typer(add_completion=False)


@app.command()
def monitor(
    rounds: Annotated[int, typer.Option(min=1, help="Every side is measured this often, in turns.")] = 9,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time recording a value and an event, ours beside prometheus-client and logging.

    The 99th percentile is of single calls, and has the time of reading the clock in it, on both sides.
    """
    budget = SampleBudget(num_samples=rounds, sample_s=SAMPLE_S)
    show_rows(list(_rows(budget)), title="recording, one thread", header="monitor", output=output)


def value_rows(budget: SampleBudget) -> Iterator[Row]:
    """Recording one value: the mean of many calls, and the 99th percentile of single ones."""
    from prometheus_client import CollectorRegistry, Histogram

    metric = RankMetrics()("torsh_step_seconds")
    histogram = Histogram("step_seconds", "a histogram", registry=CollectorRegistry())
    theirs = "prometheus-client"
    yield compare(
        "record a value",
        called_often(metric.record, 0.02),
        {theirs: called_often(histogram.observe, 0.02)},
        budget=budget,
        amount=_BATCH,
    )
    found: dict[str, list[float]] = {OURS: [], theirs: []}
    for _ in range(budget.num_samples):
        found[OURS].append(_late_call_s(metric.record, 0.02))
        found[theirs].append(_late_call_s(histogram.observe, 0.02))
    measured = {who: SampleMedian.of(samples) for who, samples in found.items()}
    name = "record a value, 99th percentile"
    yield Row(name=name, unit=RowUnit.SECONDS, ours=measured.pop(OURS), rivals=measured)


def called_often(function: Callable[[Any], object], argument: object) -> Workload:
    """Call the function 2,000 times from C: a Python loop would cost as much as the function."""

    def batch() -> None:
        collections.deque(map(function, itertools.repeat(argument, _BATCH)), maxlen=0)

    return batch


def _late_call_s(function: Callable[[float], object], argument: float) -> float:
    """The 99th percentile of the seconds of one call."""
    clock, taken = time.perf_counter_ns, []
    gc.disable()  # what is measured allocates nothing that stays
    try:
        for _ in range(_NUM_SINGLE):
            started = clock()
            function(argument)
            taken.append(clock() - started)
    finally:
        gc.enable()
    return sorted(taken)[int(0.99 * _NUM_SINGLE)] / 1e9


def _rows(budget: SampleBudget) -> Iterator[Row]:
    yield from value_rows(budget)
    event = StepEvent(step=1, loss=2.5, duration_s=0.05, comm_s=0.01)
    silent, heard = logging.Logger("silent", logging.WARNING), logging.Logger("heard", logging.DEBUG)
    heard.addHandler(logging.NullHandler())
    yield compare(
        "an event, nobody listens",
        called_often(emit, event),
        {"logging": called_often(silent.debug, "a step")},
        budget=budget,
        amount=_BATCH,
    )
    unsubscribe = subscribe(lambda _: None, StepEvent)
    try:
        yield compare(
            "an event, one listener",
            called_often(_emit_step, 1),
            {"logging": called_often(lambda step: heard.debug("step %d loss %f took %f", step, 2.5, 0.05), 1)},
            budget=budget,
            amount=_BATCH,
        )
    finally:
        unsubscribe()
    with tempfile.TemporaryDirectory() as folder, JsonlSink(folder) as sink:

        def to_file() -> None:
            for step in range(_BATCH):
                _emit_step(step)
            sink.flush()

        yield compare("an event, to a file as a line of JSON", to_file, {}, budget=budget, amount=_BATCH)


def _emit_step(step: int) -> None:
    emit(StepEvent(step=step, loss=2.5, duration_s=0.05, comm_s=0.01))
