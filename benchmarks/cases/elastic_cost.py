"""What surviving failures costs while nothing fails: steps of an elastic job beside steps of a plain one."""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit

_STEP_S = 0.05
_WIDTH = 384
_LIMIT_S = 120.0
_JOBS_LAST_S = 25.0
_PLAIN, _AGAIN, _ELASTIC = "plain", "plain-again", "elastic"

# Each rank waits for a byte before every block, so jobs take turns and one that waits uses no processor.
_SCRIPT = """
import functools, json, os, sys, time, torch
import torsh_distributed as td

folder, name, optimizer, width, rows, steps = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:])
torch.set_num_threads(1)
is_elastic = name == "elastic"
plan = td.Plan.from_dict({
    "training": {"steps": 10**9, "batch_size": rows * int(os.environ["WORLD_SIZE"]), "exactly_once": is_elastic},
})
td.init(plan)
torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
made = torch.optim.AdamW if optimizer == "AdamW" else td.train.CpuAdam
engine = td.parallelize(model, functools.partial(made, lr=1e-4), plan, loss_fn=torch.nn.functional.mse_loss)
inputs = torch.randn(1, width).expand(100_000, width)
targets = torch.randn(1, 1).expand(100_000, 1)
data = torch.utils.data.TensorDataset(inputs, targets)
loader = torch.utils.data.DataLoader(data, batch_size=plan.training.batch_size, shuffle=True)
go = open(f"{folder}/{name}-go-{os.environ['RANK']}", "rb", buffering=0)
done = open(f"{folder}/{name}-done", "wb", buffering=0) if os.environ["RANK"] == "0" else None
count, warm = 0, 2
for batch in engine.batches(loader):
    if count == 0 and not go.read(1):
        break
    if count == warm:
        start = time.perf_counter()
    engine.step(batch)
    count += 1
    if count == warm + steps:
        if done is not None:
            done.write(json.dumps((time.perf_counter() - start) / steps).encode() + b"\\n")
        count = 0
os._exit(0)
"""


class _Job:
    """A job that trains a block of steps whenever it is told to."""

    def __init__(self, folder: Path, name: str, optimizer: str, *, num_ranks: int, rows: int, steps: int) -> None:
        script = folder / "train.py"
        script.write_text(_SCRIPT)
        self._paths = [folder / f"{name}-go-{rank}" for rank in range(num_ranks)]
        for path in (*self._paths, folder / f"{name}-done"):
            os.mkfifo(path)
        options = ["--elastic"] if name == _ELASTIC else []
        command = [sys.executable, "-m", "torsh_distributed.run", *options, "--nproc-per-node", str(num_ranks)]
        arguments = [str(folder), name, optimizer, str(_WIDTH), str(rows), str(steps)]
        self._output = (folder / f"{name}-output").open("w+")
        self._process = subprocess.Popen(
            [*command, str(script), *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        # For reading too, so opening does not wait for the other end.
        self._go = [os.open(path, os.O_RDWR) for path in self._paths]
        self._done = os.open(folder / f"{name}-done", os.O_RDWR)

    def block_s(self) -> float:
        """Seconds for a step, over one block."""
        for pipe in self._go:
            os.write(pipe, b"+")
        deadline = time.monotonic() + _LIMIT_S
        while not select.select([self._done], [], [], 1.0)[0]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._output.seek(0)
                raise RuntimeError(self._output.read()[-3000:])
        return float(json.loads(os.read(self._done, 4096)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._go:
            os.close(pipe)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=30)
        os.close(self._done)
        self._output.close()


def _rows_for(num_ranks: int) -> int:
    """Samples for each rank that make a step last about 50 ms here."""
    with tempfile.TemporaryDirectory(prefix="torsh-cost-") as name:
        found = {}
        for rows in (64, 256):
            folder = Path(name) / str(rows)
            folder.mkdir()
            with _Job(folder, _PLAIN, "AdamW", num_ranks=num_ranks, rows=rows, steps=5) as job:
                found[rows] = min(job.block_s() for _ in range(3))
    for_a_row = max(1e-6, (found[256] - found[64]) / 192)
    return max(16, round(64 + (_STEP_S - found[64]) / for_a_row))


def _rounds(
    optimizer: str, *, num_ranks: int, rows: int, num_rounds: int, steps: int, lasts_s: float
) -> list[dict[str, float]]:
    """Blocks of the three jobs in turns, in one order and then in the other, until the time is over."""
    names = (_PLAIN, _ELASTIC, _AGAIN)
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="torsh-cost-") as folder, ExitStack() as stack:
        jobs = {
            name: stack.enter_context(_Job(Path(folder), name, optimizer, num_ranks=num_ranks, rows=rows, steps=steps))
            for name in names
        }
        for job in jobs.values():
            job.block_s()  # warms up
        start_s = time.monotonic()
        for number in range(num_rounds):
            found.append({name: jobs[name].block_s() for name in (names if number % 2 else names[::-1])})
            if time.monotonic() - start_s > lasts_s:
                break
    return found


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and an interval that holds the true one with 95 %, from the order of the values alone."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def _in_words(values: Sequence[float]) -> str:
    middle, low, high = (100 * (value - 1) for value in interval_of_median(values))
    return f"{middle:+.2f} % (95 %: {low:+.2f} to {high:+.2f} %)"


def _rows(budget: Budget) -> Iterator[Row | Note]:
    num_ranks = 4 if (os.cpu_count() or 1) >= 8 else 2
    rows = 64 if budget.is_quick else _rows_for(num_ranks)
    num_jobs, num_rounds, steps = (1, 2, 3) if budget.is_quick else (4, 40, 10)
    for optimizer in ("AdamW",) if budget.is_quick else ("AdamW", "CpuAdam"):
        rounds = [
            took
            for _ in range(num_jobs)
            for took in _rounds(
                optimizer, num_ranks=num_ranks, rows=rows, num_rounds=num_rounds, steps=steps, lasts_s=_JOBS_LAST_S
            )
        ]
        plain = [(took[_PLAIN] + took[_AGAIN]) / 2 for took in rounds]
        elastic = [took[_ELASTIC] for took in rounds]
        yield Row(
            name=f"a step, {num_ranks} ranks, {optimizer}",
            unit=Unit.SECONDS,
            ours=Measurement.of(elastic),
            rivals={"not elastic": Measurement.of(plain)},
        )
        added = _in_words([one / other for one, other in zip(elastic, plain, strict=True)])
        noise = _in_words([took[_AGAIN] / took[_PLAIN] for took in rounds])
        yield Note(
            text=f"{optimizer}: --elastic with exactly_once adds {added} to a step, in {len(rounds)} rounds of"
            f" {steps} steps each; one plain job beside another {noise}"
        )


CASE = Case(
    title="Elastic: what it costs while nothing fails",
    about="""Three jobs of one script take turns, block by block: two plain ones, and one under `torsh run --elastic`
    with training.exactly_once, so with control plane, ledger and votes on every step. A step takes about 50 ms. CpuAdam
    divides its update among the ranks of a node, which an elastic job gives up: its row shows what that costs.""",
    rows=_rows,
)
