"""What observing a job costs: a value, an event, a whole step with everything on, and a thousand ranks on one core."""

from __future__ import annotations

import collections
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit, compare
from torsh_distributed import events
from torsh_distributed.observe.anomalies import AnomalyWatch
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.metrics.machine_sensors import ProcessSensors
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.rank_reporter import step_packet, summary_packet

_BATCH = 1000
_NUM_RANKS = 1000

_LOOP = """
import json, os, sys, threading, time, torch, torch.distributed as dist
from torsh_distributed.events import step_notes
from torsh_distributed.launch.worker.launcher_line import open_line
from torsh_distributed.observe.loops.model_watch import ModelWatch
from torsh_distributed.observe.metrics.process_metrics import start_reporting, stop_reporting

stop_reporting()
dist.init_process_group("shm")
torch.set_num_threads(1)
cores = sorted(os.sched_getaffinity(0))
if len(cores) >= 8:  # a rank stays on its half of them: moving between cores changes a step by more than observing does
    half = len(cores) // 2
    os.sched_setaffinity(0, cores[dist.get_rank() * half :][:half])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(6))))
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows, target_s = 64, 0.03

def steps(number):
    start = time.perf_counter()
    batch, wanted = torch.ones(rows, 384), torch.zeros(rows, 384)
    for _ in range(number):
        criterion(model(batch), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / number

steps(5)
for _ in range(3):  # until a step takes as long as it should
    took = torch.tensor(steps(20))
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    rows = max(8, int(rows * target_s / took.item()))
"""
# Blocks of steps with and without a reporter take turns in one job, so what slows the machine down slows both. A block
# lasts a little longer than the four seconds between two summaries with metrics. Before it is timed, as many steps run
# untimed with a reporter: it finds the model, counts its operations twice, and sends two summaries with all metrics,
# which a job does once.
_BLOCKS = """
num_blocks, block_s = int(sys.argv[1]), float(sys.argv[2])
number = max(2, round(block_s / target_s))
blocks = []
for block in range(num_blocks):
    is_on = bool(block % 2)
    if is_on:
        start_reporting(open_line().send)
    steps(number if is_on else 12)
    dist.barrier()
    blocks.append((is_on, steps(number)))
    if is_on:
        stop_reporting()
if dist.get_rank() == 0:
    print("BLOCKS", json.dumps({"steps": number, "blocks": blocks}))
"""
# Where it goes, as processor time. A machine that others use as well changes what a step takes by more than observing
# does, but hardly what observing takes of it. The launcher hears beats without a reporter too: that is taken off.
_PARTS = (
    _LOOP
    + """
import glob, psutil

number = int(sys.argv[1])
in_hooks, in_empty = [0.0, 0], [0.0, 0]

def timed(function, sums=in_hooks):
    def call(*args, **kwargs):
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            sums[0] += time.thread_time() - start
            sums[1] += 1
    return call

def time_hooks():
    from torch.optim import optimizer as module
    for hooks in (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks):
        for key, hook in list(hooks.items()):
            hooks[key] = timed(hook)
    step_notes.note_wait, step_notes.note_started = timed(step_notes.note_wait), timed(step_notes.note_started)
    for name in ("before_forward", "after_forward", "_begin_backward", "_end_backward", "_end_averaging"):
        setattr(ModelWatch, name, timed(getattr(ModelWatch, name)))
    # Between long operations measuring takes microseconds itself; a hook that does nothing says how many.
    module.register_optimizer_step_pre_hook(timed(lambda *args: None, in_empty))

def spent_s(*paths):
    return sum(int(open(path).read().split()[0]) for path in paths) / 1e9

def spent_beside_s():
    launcher = psutil.Process(os.getppid())
    observers = [one for one in launcher.children() if "observer_process" in " ".join(one.cmdline())]
    return spent_s(*(path for one in (launcher, *observers) for path in glob.glob(f"/proc/{one.pid}/task/*/schedstat")))

def spent_in_thread_s():
    mine = [one.native_id for one in threading.enumerate() if one.name == "torsh-metrics"]
    return spent_s(*(f"/proc/self/task/{one}/schedstat" for one in mine))

found = {}
for is_on in (False, True):
    if is_on:
        start_reporting(open_line().send)
    steps(1 + number // 8)
    if is_on:
        time_hooks()
    in_hooks[:], in_empty[:] = [0.0, 0], [0.0, 0]
    beside_s, thread_s = spent_beside_s(), spent_in_thread_s()
    step_s = steps(number)
    hooks_s = in_hooks[0] - in_hooks[1] * in_empty[0] / max(1, in_empty[1])
    found[is_on] = step_s, hooks_s, spent_in_thread_s() - thread_s, spent_beside_s() - beside_s
if dist.get_rank() == 0:
    step_s, hooks_s, thread_s, beside_s = found[True]
    parts = [hooks_s / number, thread_s / number, max(0.0, beside_s - found[False][3]) / number]
    print("PARTS", json.dumps([step_s, *parts]))
"""
)
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


def _run(script: str, *args: object, report: Path, num_ranks: int = 2) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worker.py"
        path.write_text(script)
        command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--nproc-per-node", str(num_ranks)]
        command += ["--dashboard", "--dashboard-port", "0", "--html-report", str(report), str(path), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def _state(report: Path) -> dict[str, Any]:
    (data,) = re.findall(r'id="state">(.*?)</script>', report.read_text(), re.DOTALL)
    state: dict[str, Any] = json.loads(data)
    return state


def _values(budget: Budget) -> Iterator[Row]:
    wait = events.WaitEvent(op="all_reduce", group="0", num_started=1, num_bytes=4096, start_s=0.0, duration_s=1e-4)

    def take() -> None:
        taker = RankCollector().attach()
        collections.deque(map(events.emit, itertools.repeat(wait, _BATCH)), maxlen=0)
        taker.detach()

    def take_and_fold() -> None:
        collections.deque(map(events.emit, itertools.repeat(wait, _BATCH)), maxlen=0)
        collector.fold()

    yield compare("an event, taken by the training thread", take, {}, budget=budget, amount=_BATCH)
    collector = RankCollector().attach()
    try:
        yield compare("an event, taken and added up", take_and_fold, {}, budget=budget, amount=_BATCH)
    finally:
        collector.detach()


def paired(
    budget: Budget, *, name: str = "a step of two ranks", loop: str = _LOOP, num_ranks: int = 2
) -> Iterator[Row | Note]:
    """A loop in blocks of steps with a reporter and without."""
    num_blocks, block_s = (7, 0.15) if budget.is_quick else (61, 4.2)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        output = _run(loop + _BLOCKS, num_blocks, block_s, report=report, num_ranks=num_ranks)
    found = json.loads(output.partition("BLOCKS ")[2].splitlines()[0])
    blocks = found["blocks"]
    on = [seconds for is_on, seconds in blocks if is_on]
    off = [seconds for is_on, seconds in blocks if not is_on]
    yield Row(
        name=f"{name}, everything on",
        unit=Unit.SECONDS,
        ours=Measurement.of(on),
        rivals={"off": Measurement.of(off)},
    )
    # Each block with a reporter against the two around it: a machine that becomes slower step by step does not count.
    changes = [2 * one / (off[number] + off[number + 1]) - 1 for number, one in enumerate(on)]
    low, high = _interval(changes)
    yield Note(
        text=f"Observing changes a step by {statistics.median(changes):+.2%} (95 % interval {low:+.2%} to {high:+.2%} "
        f"by resampling {len(changes)} blocks of {found['steps']} steps, each between two without); at most 0.5 % is "
        "the aim."
    )


def _parts(budget: Budget) -> Iterator[Note]:
    with tempfile.TemporaryDirectory() as folder:
        output = _run(_PARTS, 20 if budget.is_quick else 1500, report=Path(folder) / "report.html")
    step_s, hooks_s, thread_s, beside_s = json.loads(output.partition("PARTS ")[2].splitlines()[0])
    yield Note(
        text=f"Of a step of {step_s * 1e3:.0f} ms observing takes {hooks_s * 1e6:.0f} µs of the training thread, "
        f"{thread_s * 1e6:.0f} µs of another thread of the rank, and {beside_s * 1e6:.0f} µs of the launcher and the "
        f"process beside it, of processor time: {(hooks_s + thread_s) / step_s:.2%} where those two have a core of "
        f"their own, {(hooks_s + thread_s + beside_s / 2) / step_s:.2%} where two ranks have only two cores."
    )


def _interval(values: list[float], *, num_resamples: int = 4000) -> tuple[float, float]:
    """Of their median, at 95 %, by resampling."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(num_resamples))
    return medians[int(0.025 * num_resamples)], medians[int(0.975 * num_resamples) - 1]


def _second(budget: Budget) -> Iterator[Row | Note]:
    """What one rank does beside training in a second of 33 steps: adds up, makes the summary, and sends it."""
    collector = RankCollector()
    sensors, sent = ProcessSensors(), []
    moment = [100.0, 0]

    def second() -> None:
        for _ in range(33):
            start_s = moment[0]
            for op in ("all_reduce", "all_reduce", "broadcast"):
                wait = events.WaitEvent(
                    op=op, group="0", num_started=1, num_bytes=4096, start_s=start_s + 0.02, duration_s=0.001
                )
                collector.take_later(wait, now_s=start_s + 0.021)
            for name, at_s in (("forward", 0.0), ("backward", 0.01), ("optimizer", 0.025)):
                phase = events.PhaseEvent(phase=name, start_s=start_s + at_s, duration_s=0.005)
                collector.take_later(phase, now_s=start_s + at_s + 0.005)
            moment[0] += 0.03
            moment[1] += 1
            done = events.StepEvent(step=moment[1], loss=1.0, duration_s=0.03, num_samples=8, learning_rate=0.1)
            collector.take_later(done, now_s=moment[0])
        collector.fold()
        sensors.read(collector.metrics)
        packet = summary_packet(collector, rank=0, sequence=1, time=1.0, clock=0.0, facts={"node": "a"})
        sent[:] = [json.dumps(packet).encode()]

    for _ in range(20):  # so that the rings are full
        second()
    row = compare("a rank beside its training, in a second", second, {}, budget=budget)
    yield row
    yield Note(
        text=f"That is {row.ours.median:.2%} of the second in which 33 steps run, and {len(sent[0]) / 1024:.0f} KiB."
    )


def _stragglers(budget: Budget) -> Iterator[Note]:
    num_clean = 60 if budget.is_quick else 1000
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        _run(_SLOW_RANK, num_clean, 60, report=report)
        told = [one for one in _state(report)["incidents"] if one["type"] == "straggler"]
    early = [one for one in told if one["step"] <= num_clean]
    late = [one for one in told if one not in early]
    found = "nobody"
    if late:
        found = f"rank {late[0]['rank']}, {late[0]['step'] - num_clean} steps after it became slower"
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

    def packets(turn: int) -> list[bytes]:
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
            about: dict[str, Any] = {"rank": rank, "sequence": next(clocks), "time": 1.0, "clock": 0.0}
            # A rank tells its metrics every fourth second, and ranks take turns.
            is_turn = not step or rank % 4 == turn % 4
            told = (
                summary_packet(collector, facts={"node": "a"}, **about) if is_turn else step_packet(collector, **about)
            )
            found.append(json.dumps(told).encode())
        step += 3
        return found

    sent = [packets(0)]
    seconds = itertools.cycle([packets(turn) for turn in range(1, 5)])

    def second() -> None:
        for packet in sent[0]:
            view.take(json.loads(packet))
        watch.tick()
        json.dumps(page_state(view))

    second()

    def next_second() -> None:
        sent[0] = next(seconds)
        second()

    yield compare("a second of 1,000 ranks: taken, judged, shown", next_second, {}, budget=budget)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    yield from _values(budget)
    yield from _second(budget)
    yield from _many_ranks(budget)
    yield from _parts(budget)
    yield from paired(budget)
    yield from _stragglers(budget)


CASE = Case(
    title="Observing: what it costs",
    about="""An event from its emit until it is added up; what a rank does beside its training in a second;
    what the process beside the launcher does in a second of a thousand ranks (a fifth of a core is the aim); a step of
    30 ms of torch's DDP on two ranks with summaries, page and report on, in turns with steps without; and a real rank
    that computes 30 % longer than the other.""",
    rows=_rows,
)
