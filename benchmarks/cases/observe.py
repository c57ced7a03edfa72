"""What observing a job costs: a value, an event, a whole step with everything on, and a thousand ranks on one core."""

from __future__ import annotations

import collections
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit, compare
from torsh_distributed import events
from torsh_distributed.observe.anomalies.anomaly_watch import AnomalyWatch
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.rank_metrics import RankMetrics
from torsh_distributed.observe.metrics.rank_reporter import summary_packet

_BATCH = 1000
_NUM_RANKS = 1000

# Blocks of steps with and without a reporter take turns in one job, so what slows the machine down slows both.
_PAIRED = """
import json, os, sys, time, torch, torch.distributed as dist
import torsh_distributed as td
from torsh_distributed.launch.worker.launcher_line import open_line
from torsh_distributed.observe.metrics.process_metrics import start_reporting, stop_reporting

num_blocks, steps, target_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
stop_reporting()
dist.init_process_group("shm")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(6))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows = 64

def step():
    model(torch.ones(rows, 384)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    step()
start = time.perf_counter()
for _ in range(5):
    step()
took = torch.tensor((time.perf_counter() - start) / 5)
dist.all_reduce(took, op=dist.ReduceOp.MAX)
rows = max(8, int(rows * target_s / took.item()))
step()
blocks = []
for block in range(num_blocks):
    is_on = bool(block % 2)
    if is_on:
        start_reporting(open_line().send)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    blocks.append((is_on, (time.perf_counter() - start) / steps))
    if is_on:
        stop_reporting()
if dist.get_rank() == 0:
    print("BLOCKS", json.dumps(blocks))
"""
_SLOW_RANK = """
import os, sys, time, torch, torch.distributed as dist

dist.init_process_group("shm")
torch.set_num_threads(1)
rank, num_clean, num_slow = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2])
weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=1e-3)
gradient = torch.ones(1000)

def compute(seconds):
    # Of this thread's processor time: a busy machine slows the clock on the wall, not the work.
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

for number in range(num_clean + num_slow):
    compute(0.005 * (1.3 if number >= num_clean and rank == 1 else 1.0))
    dist.all_reduce(gradient)
    optimizer.step()
time.sleep(0)
"""


def _run(script: str, *args: object, report: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worker.py"
        path.write_text(script)
        command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--nproc-per-node", "2"]
        command += ["--dashboard", "--dashboard-port", "0", "--html-report", str(report), str(path), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def _state(report: Path) -> dict[str, Any]:
    (data,) = re.findall(r'id="state">(.*?)</script>', report.read_text(), re.DOTALL)
    state: dict[str, Any] = json.loads(data)
    return state


def _each(function: Callable[[Any], object], argument: object) -> Callable[[], None]:
    """Call the function `_BATCH` times from C: a Python loop would cost as much as the function."""

    def batch() -> None:
        collections.deque(map(function, itertools.repeat(argument, _BATCH)), maxlen=0)

    return batch


def _values(budget: Budget) -> Iterator[Row]:
    from prometheus_client import CollectorRegistry, Histogram

    metric = RankMetrics()("torsh_step_seconds")
    histogram = Histogram("step_seconds", "a histogram", registry=CollectorRegistry())
    rivals = {"prometheus-client": _each(histogram.observe, 0.02)}
    yield compare("record a value", _each(metric.record, 0.02), rivals, budget=budget, amount=_BATCH)
    collector = RankCollector().attach()
    wait = events.WaitEvent(op="all_reduce", group="0", num_started=1, num_bytes=4096, start_s=0.0, duration_s=1e-4)

    def take_and_fold() -> None:
        collections.deque(map(events.emit, itertools.repeat(wait, _BATCH)), maxlen=0)
        collector.fold()

    try:
        yield compare("an event, taken and added up", take_and_fold, {}, budget=budget, amount=_BATCH)
    finally:
        collector.detach()


def _paired(budget: Budget) -> Iterator[Row | Note]:
    num_blocks, steps = (4, 5) if budget.is_quick else (60, 30)
    with tempfile.TemporaryDirectory() as folder:
        output = _run(_PAIRED, num_blocks, steps, 0.03, report=Path(folder) / "report.html")
    blocks = json.loads(output.partition("BLOCKS ")[2].splitlines()[0])
    on = [seconds for is_on, seconds in blocks if is_on]
    off = [seconds for is_on, seconds in blocks if not is_on]
    yield Row(
        name="a step of two ranks, everything on",
        unit=Unit.SECONDS,
        ours=Measurement.of(on),
        rivals={"off": Measurement.of(off)},
    )
    changes = sorted(with_it / without - 1 for with_it, without in zip(on, off, strict=True))
    error = 1.253 * statistics.stdev(changes) / math.sqrt(len(changes))  # of a median
    middle = statistics.median(changes)
    yield Note(
        text=f"Observing changes a step by {middle:+.2%} (95 % interval {middle - 1.96 * error:+.2%} to "
        f"{middle + 1.96 * error:+.2%}, {len(changes)} pairs of blocks of {steps} steps); at most 0.5 % is the aim."
    )


def _stragglers(budget: Budget) -> Iterator[Note]:
    num_clean = 60 if budget.is_quick else 1000
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        _run(_SLOW_RANK, num_clean, 60, report=report)
        told = [one for one in _state(report)["incidents"] if one["type"] == "straggler"]
    early = [one for one in told if int(re.findall(r"step (\d+)", one["detail"])[0]) < num_clean - 3]
    late = [one for one in told if one not in early]
    found = "nobody"
    if late:
        since = int(re.findall(r"step (\d+)", late[0]["detail"])[0])
        found = f"rank {late[0]['rank']}, {since + 3 - num_clean} steps after it became slower"
    yield Note(
        text=f"A rank that computes 30 % longer from step {num_clean} on: {found} (at most 5 is the aim); "
        f"names in the {num_clean} steps before, where both are equal: {len(early)}."
    )


def _many_ranks(budget: Budget) -> Iterator[Row]:
    collectors = [RankCollector() for _ in range(_NUM_RANKS)]
    view = JobView()
    view.take({"type": "job", "world_size": _NUM_RANKS})
    watch = AnomalyWatch(view)
    step = 0
    clocks = itertools.count(1)

    def packets() -> list[bytes]:
        nonlocal step
        found = []
        for rank, collector in enumerate(collectors):
            for number in range(3):
                now_s = 100.0 + 0.03 * (step + number)
                wait = events.WaitEvent(
                    op="all_reduce", group="0", num_started=1, num_bytes=4096, start_s=now_s, duration_s=0.005
                )
                collector.take(wait, now_s=now_s + 0.005)
                forward = events.PhaseEvent(phase="forward", start_s=now_s, duration_s=0.03)
                collector.take(forward, now_s=now_s + 0.03)
                done = events.StepEvent(step=step + number, loss=1.0, duration_s=0.03, num_samples=8)
                collector.take(done, now_s=now_s + 0.03)
            told = summary_packet(collector, rank=rank, sequence=next(clocks), time=1.0, clock=0.0, facts={"node": "a"})
            found.append(json.dumps(told).encode())
        step += 3
        return found

    sent = packets()

    def second() -> None:
        for packet in sent:
            view.take(json.loads(packet))
        watch.tick()
        json.dumps(page_state(view))

    yield compare("a second of 1,000 ranks: taken, judged, shown", second, {}, budget=budget)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    yield from _values(budget)
    yield from _many_ranks(budget)
    yield from _paired(budget)
    yield from _stragglers(budget)


CASE = Case(
    title="Observing: what it costs",
    about="""Recording a value, beside the histogram of prometheus-client; an event from its emit until it is added up;
    what the process beside the launcher does in a second of a thousand ranks (a fifth of a core is the aim); a step of
    30 ms of torch's DDP on two ranks with summaries, page and report on, in turns with steps without; and a real rank
    that computes 30 % longer than the other.""",
    rows=_rows,
)
