"""Energy of a job on a GPU against the driver's counter, integrated power and Zeus; and what metering costs."""

from __future__ import annotations

import bisect
import importlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from torsh_distributed.green.job_meter import JobMeter
from torsh_distributed.observe.job.run_files import EventFiles
from torsh_distributed.plan import GreenConfig

NUM_RANKS = 4
_SCRIPT = """
import time, torch, torsh_distributed as td
td.init()
device = td.device()
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).to(device)
engine = td.parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss_fn=torch.nn.functional.mse_loss)
inputs = torch.randn(2048, 4096, device=device)
until = time.monotonic() + {seconds}
while time.monotonic() < until or engine.num_steps % 20:
    engine.step((inputs, inputs))
td.destroy_process_group()
"""


class CounterLog:
    """Reads the driver's counter and power every 20 ms on a thread; both can be asked for any stretch of time."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._nvml = pynvml
        self._rows: list[tuple[float, float, float]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(0.02):
            counted_j = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
            power_w = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
            self._rows.append((time.time(), counted_j, power_w))

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        self._thread.join()

    def counted_j(self, begin: float, end: float) -> float:
        """What the counter grew by."""
        return self._at(end) - self._at(begin)

    def _at(self, moment: float) -> float:
        at = bisect.bisect_left(self._rows, (moment,))
        (before, low_j, _), (after, high_j, _) = self._rows[max(0, at - 1)], self._rows[min(at, len(self._rows) - 1)]
        return low_j if after <= before else low_j + (high_j - low_j) * (moment - before) / (after - before)

    def integrated_j(self, begin: float, end: float) -> float:
        """The power over that time."""
        rows = [row for row in self._rows if begin <= row[0] <= end]
        pairs = itertools.pairwise(rows)
        return sum((later[0] - row[0]) * (row[2] + later[2]) / 2 for row, later in pairs)


def _zeus() -> Any:
    """Zeus' monitor, if it is installed. Any: another library's."""
    try:
        return importlib.import_module("zeus.monitor").ZeusMonitor(gpu_indices=[0])
    except Exception:  # it raises what it likes where it is not at home
        return None


def _job(seconds: float) -> Iterator[Row | Note]:
    zeus, log = _zeus(), CounterLog()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(_SCRIPT.format(seconds=seconds))
        command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--green", "--share-gpu"]
        command += ["--nproc-per-node", str(NUM_RANKS), str(script)]
        if zeus is not None:
            zeus.begin_window("job", sync_execution=False)
        began = time.time()
        variables = {**os.environ, "TORSH_EVENTS_DIR": str(Path(folder, "events"))}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
        ended = time.time()
        zeus_j = zeus.end_window("job", sync_execution=False).total_energy if zeus is not None else None
        log.close()
        if done.returncode:
            yield Note(text=f"the job failed: {done.stderr[-800:]}")
            return
        view = EventFiles(Path(folder, "events")).read_all()
        records = [record for path in Path(folder, "events").glob("launcher*") for record in _energy_of(path, "gpu 0")]
    spent = view.energy.summary()
    assert spent is not None, "the job was metered"
    begin, end = min(one[0] for one in records), max(one[1] for one in records)
    ours_j = sum(one[2] for one in records)
    parts_j = spent.steps_j + spent.start_j + spent.failures_j + spent.undone_j + spent.skipped_j + spent.other_j
    yield Note(text=done.stderr.strip().splitlines()[-1])
    yield Note(
        text=f"{spent.num_steps} steps of {NUM_RANKS} ranks; parts of the account over its total: "
        f"{parts_j / spent.total_j:.6f}; over the ranks: {sum(spent.by_rank.values()) / spent.total_j:.6f}"
    )
    counted_j, integrated_j = log.counted_j(begin, end), log.integrated_j(begin, end)
    rivals = {"NVML counter": counted_j, "integrated power": integrated_j}
    yield _row("GPU energy of the job", ours_j, rivals)
    if zeus_j is not None:
        # Zeus' window is around the whole command: ours with what the counter grew before and after.
        outside_j = log.counted_j(began, begin) + log.counted_j(end, ended)
        yield _row("GPU energy of the command", ours_j + outside_j, {"Zeus": zeus_j})


def _energy_of(path: Path, meter: str) -> list[tuple[float, float, float]]:
    from torsh_distributed.events import EnergyEvent
    from torsh_distributed.events.recorded import events_in

    found = [one for one in events_in(path) if isinstance(one, EnergyEvent) and one.meter == meter]
    return [(one.time - one.duration_s, one.time, one.joules) for one in found]


def _row(name: str, ours: float, rivals: dict[str, float]) -> Row:
    return Row(
        name=name,
        unit=Unit.JOULES,
        ours=Measurement.of([ours]),
        rivals={who: Measurement.of([value]) for who, value in rivals.items()},
    )


def _overhead(budget: Budget) -> Iterator[Row | Note]:
    """Blocks of steps in turns: bare, with our meter on a thread of the same process, with Zeus around each step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(4096, 4096, device="cuda")

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    zeus = _zeus()

    def zeus_step() -> None:
        zeus.begin_window("step")
        step()
        zeus.end_window("step")

    def block(run: Callable[[], None], count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    block(step, 50)
    num_blocks, count = (2, 20) if budget.is_quick else (12, max(20, round(0.6 / block(step, 50))))
    bare: list[float] = []
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(num_blocks):
        bare.append(block(step, count))
        with JobMeter(GreenConfig(enabled=True, interval_s=0.5), ranks=[0], node=0, send=lambda record: None):
            ours.append(block(step, count))
        if zeus is not None:
            theirs.append(block(zeus_step, count))
    pairs = [with_it / without - 1 for with_it, without in zip(ours, bare, strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    yield Note(text=f"our meter in the training process adds {statistics.mean(pairs):+.3%} ± {error:.3%} to a step")
    rivals = {"no meter": Measurement.of(bare)}
    if theirs:
        rivals["Zeus, a window a step"] = Measurement.of(theirs)
    yield Row(name="one step", unit=Unit.SECONDS, ours=Measurement.of(ours), rivals=rivals)


def _rights() -> Note:
    """Whether this user may change a limit: the one that is set is set again."""
    import pynvml as nvml

    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    limit_mw = nvml.nvmlDeviceGetPowerManagementLimit(handle)
    try:
        nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
    except nvml.NVMLError as error:
        return Note(text=f"power limits may not be changed here ({error}); the limit is {limit_mw / 1e3:g} W")
    return Note(text=f"power limits may be changed here; the limit is {limit_mw / 1e3:g} W")


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
        yield Note(text="needs a GPU and nvidia-ml-py")
        return
    yield from _job(4.0 if budget.is_quick else 15.0)
    yield _rights()
    yield from _overhead(budget)


CASE = Case(
    title="Energy on a GPU",
    about="""Four ranks on one GPU under `torsh run --green`: what the account of the job has for the GPU against the
    growth of the driver's counter over the same time, its power integrated every 20 ms, and Zeus around the command.
    Then the cost of metering: blocks of steps in turns without a meter, with ours on a thread of the same process (in
    a job it is in the launcher) and with a window of Zeus around each step.""",
    rows=_rows,
)
