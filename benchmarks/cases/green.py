"""What a policy on carbon saves against knowing the future, and what budgets, pauses and kills cost."""

from __future__ import annotations

import csv
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.green.nvml_stand_in import StandIn
from torsh_distributed.green.carbon.intensity import Intensity, IntensitySeries
from torsh_distributed.green.job_meter import JobMeter
from torsh_distributed.green.power.pacing import PaceControl
from torsh_distributed.green.schedule.allocation import JobShape, TimeSlot, allocate, run_now
from torsh_distributed.green.schedule.carbon_policy import CarbonPolicy
from torsh_distributed.observe.job.energy_account import EnergyAccount
from torsh_distributed.observe.job.run_files import EventFiles
from torsh_distributed.plan import GreenConfig

TRACES = Path(__file__).parents[1] / "traces"
"""Files `NAME.csv` with a column `g_per_kwh`, an hour a row, are replayed too; none is part of this repository."""
WORK_H, DEADLINE_H, STEP_S = 48, 96, 60.0
_SPEEDS = (1.0, 1.9)
_HOUR_S = 3600.0


# Replay


@dataclass(frozen=True)
class Replay:
    """One job from one start: grams by the policy, with the whole future known, and at once."""

    policy_g: float
    foresight_g: float
    now_g: float
    is_late: bool


def synthetic_year(*, mean: float, wind: float, daily: Callable[[int, float], float], seed: int) -> list[float]:
    """Hours of a year: a daily shape, quiet weekends, and weather that lasts for days. No real grid's numbers."""
    draw, weather, found = random.Random(seed), 0.0, list[float]()
    for hour in range(366 * 24):
        weather = 0.985 * weather + math.sqrt(1 - 0.985**2) * draw.gauss(0, 1)
        season = math.cos(2 * math.pi * hour / (366 * 24))
        weekend = -0.08 * mean if hour // 24 % 7 >= 5 else 0.0
        found.append(max(0.2 * mean, mean + wind * weather + daily(hour % 24, season) + weekend))
    return found


def british(hour: int, season: float) -> float:
    """Two peaks, the larger one in the evening; less at night."""
    return 30 * math.sin(2 * math.pi * (hour - 9) / 24) + 25 * math.sin(4 * math.pi * (hour - 4) / 24) + 15 * season


def german(hour: int, season: float) -> float:
    """The sun at noon, more of it in summer."""
    return 20 - (70 - 45 * season) * max(0.0, math.sin(math.pi * (hour - 6) / 12)) if 6 <= hour <= 18 else 20.0


def replay(trace: Sequence[float], start: int, seed: int) -> Replay:
    """48 hours of one worker within 96, with one or two workers, decided every hour on a forecast that is wrong.

    Its error grows from 4 % now to 16 % in two days, lasts for hours and is another one in each hour's forecast.
    """
    draw = random.Random(seed)
    config = GreenConfig(carbon="file", carbon_file="-", strategy="minimize_carbon", deadline=f"{DEADLINE_H}h")
    policy = CarbonPolicy(config, min_workers=1, max_workers=2, now=0.0)
    speed = policy.speed
    speed.total_steps = round(WORK_H * _HOUR_S / STEP_S)
    for workers in (1, 2):
        for _ in range(5):
            speed.take_step(step=0, step_s=STEP_S / _SPEEDS[workers - 1], workers=workers)
    speed.busy_w = 2000.0
    done, grams, hour = 0.0, 0.0, 0
    while done < speed.total_steps and hour < 2 * DEADLINE_H:
        series = _forecast(trace, start, hour, draw)
        for _ in range(2):
            decision = policy.decide(series, now=hour * _HOUR_S)
        rate = 0.0 if not decision.workers else _SPEEDS[decision.workers - 1] * _HOUR_S / STEP_S
        rate *= draw.gauss(1.0, 0.01)
        share = min(1.0, (speed.total_steps - done) / rate) if rate > 0 else 1.0
        grams += decision.workers * share * trace[start + hour]
        done += rate * share
        if rate > 0:
            speed.take_step(step=int(done), step_s=_HOUR_S / rate, workers=decision.workers)
        else:
            speed.take_power(1e-6, workers=0)  # known from the first hold on
        hour += 1
    ended_h = hour - 1 + share
    slots = [
        TimeSlot(at * _HOUR_S, (at + 1) * _HOUR_S, value) for at, value in enumerate(trace[start : start + DEADLINE_H])
    ]
    job = JobShape(work_h=WORK_H, speeds=_SPEEDS, busy_w=1000.0)
    return Replay(grams, allocate(job, slots).grams, run_now(job, slots).grams, ended_h > DEADLINE_H + 1e-6)


def _forecast(trace: Sequence[float], start: int, hour: int, draw: random.Random) -> IntensitySeries:
    """The day before as it was, and two days ahead as they are forecast; beyond, the day before stands in."""
    values, error = [], draw.gauss(0, 1)
    for ahead in range(-24, 48):
        at = start + hour + ahead
        if not 0 <= at < len(trace):
            continue
        error = 0.9 * error + math.sqrt(1 - 0.81) * draw.gauss(0, 1)
        wrong = 1.0 if ahead < 0 else max(0.3, 1 + (0.04 + 0.12 * ahead / 48) * error)
        begin = (hour + ahead) * _HOUR_S
        basis = "measured" if ahead < 0 else "forecast"
        values.append(Intensity(trace[at] * wrong, begin, begin + _HOUR_S, "average", basis, "replay", "-"))
    return IntensitySeries(values)


def _replays(budget: Budget) -> Iterator[Row | Note]:
    traces: dict[str, Sequence[float]] = {
        "like GB, synthetic": synthetic_year(mean=200, wind=60, daily=british, seed=1),
        "like DE, synthetic": synthetic_year(mean=310, wind=85, daily=german, seed=2),
    }
    for path in sorted(TRACES.glob("*.csv")):
        with path.open(newline="") as file:
            traces[path.stem.replace("_", " ")] = [float(row["g_per_kwh"]) for row in csv.DictReader(file)]
    num_starts = 5 if budget.is_quick else 200
    for name, trace in traces.items():
        draw = random.Random(7)
        starts = [draw.randrange(24, len(trace) - 2 * DEADLINE_H - 48) for _ in range(num_starts)]
        with ProcessPoolExecutor(2) as pool:
            found = list(pool.map(partial(replay, trace), starts, range(num_starts)))
        yield Row(
            name=name,
            unit=Unit.GRAMS,
            ours=Measurement.of([one.policy_g for one in found]),
            rivals={
                "perfect foresight": Measurement.of([one.foresight_g for one in found]),
                "at once": Measurement.of([one.now_g for one in found]),
            },
        )
        ours, oracle = sum(one.policy_g for one in found), sum(one.foresight_g for one in found)
        saved = 1 - ours / sum(one.now_g for one in found)
        yield Note(
            text=f"replay, {name}: {ours / oracle - 1:+.1%} grams against perfect foresight, {saved:.0%} less than at "
            f"once; {sum(one.is_late for one in found)} of {num_starts} deadlines missed"
        )


# Budgets, prediction, pauses


def _arithmetic() -> Iterator[Note]:
    """What a tenth of a run says about the whole, and a node of 400 W under a cap of 250 W."""
    draw, errors, num_inside = random.Random(3), list[float](), 0
    for _ in range(200):
        account, steps = EnergyAccount(), [draw.gauss(100.0, 15.0) for _ in range(1000)]
        _feed(account, steps[:100])
        found = account.summary(total_steps=len(steps))
        assert found is not None
        assert found.predicted_j is not None, "a hundred steps were made"
        assert found.predicted_error_j is not None, "likewise"
        errors.append(abs(found.predicted_j / sum(steps) - 1))
        num_inside += abs(found.predicted_j - sum(steps)) <= found.predicted_error_j
    yield Note(
        text="account: prediction from a tenth of 200 runs whose steps vary by 15 %: "
        f"{sum(error <= 0.05 for error in errors)} within 5 %, half within {statistics.median(errors):.1%}, worst "
        f"{max(errors):.1%} off; {num_inside} within the interval that was told"
    )
    control, powers = PaceControl(250.0), list[float]()
    control.update(80.0, 1.0)
    for _ in range(60):
        load_w = 400.0 + draw.gauss(0, 15.0)
        powers.append(80.0 + (load_w - 80.0) / (1 + control.pause_share))
        control.update(powers[-1], 1.0)
    mean_w = statistics.mean(powers[10:])
    yield Note(text=f"account: pacing a node of 400 W (80 W idle) under 250 W: mean after 10 s {mean_w:.1f} W")


def _feed(account: EnergyAccount, joules: Sequence[float]) -> None:
    from torsh_distributed.events import EnergyEvent
    from torsh_distributed.observe.metrics.step_record import StepRecord

    for number, spent in enumerate(joules, start=1):
        record = StepRecord(number, float(number), 1.0, None, None, None, None, None, None, 1.0, None, 8)
        account.take_step(record)
        event = EnergyEvent(
            time=float(number), node=0, meter="m", source="rapl", is_measured=True, joules=spent, duration_s=1.0
        )
        account.take_energy(event)


# Jobs on a stand-in for the driver's library

_SCRIPT = """
import os
from pathlib import Path
import torch
import torsh_distributed as td

plan = td.Plan.load(os.environ["TORSH_PLAN"])
td.init(plan)
model = torch.nn.Linear(64, 64)
engine = td.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01), plan, loss_fn=torch.nn.functional.mse_loss)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 64))
counter = Path(os.environ["NVML_STAND_IN"], "energy-0")
for batch in engine.batches(torch.utils.data.DataLoader(data, batch_size=16)):
    engine.step(batch)
    if td.rank() == 0:
        counter.with_suffix(".new").write_text(str(100 * engine.num_steps))
        counter.with_suffix(".new").replace(counter)
"""


def _job(budget: Budget) -> Iterator[Note]:
    """Four ranks on one GPU whose every step takes 0.1 J, with a budget that ends them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpu = StandIn(folder / "nvml")
        gpu.write("energy-0", 0)
        limit_kwh = (20.0 if budget.is_quick else 60.0) / 3.6e6
        (folder / "train.py").write_text(_SCRIPT)
        (folder / "plan.toml").write_text(
            f'[training]\nsteps = 100000000\nbatch_size = 16\n[checkpoint]\nenabled = true\ndir = "{folder}/kept"\n'
            f"every_steps = 100000000\n[green]\nenabled = true\ninterval_s = 0.5\nnode_full_w = 1e-9\n"
            f'max_kwh = {limit_kwh}\non_budget = "stop"\n'
        )
        command = [*_RUN, "--nproc-per-node", "4", "--plan", str(folder / "plan.toml"), str(folder / "train.py")]
        variables = {**os.environ, **gpu.variables, "TORSH_EVENTS_DIR": str(folder / "events")}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
        spent = EventFiles(folder / "events").read_all().energy.summary() if done.returncode == 75 else None
        if spent is None:
            yield Note(text=f"account: the job with a budget failed: {done.stderr[-600:]}")
            return
        counted_j = gpu.read("energy-0") / 1e3
        lost_j = spent.failures_j + spent.undone_j + spent.skipped_j
        parts_j = spent.steps_j + spent.start_j + spent.other_j + spent.held_j + lost_j
        told = re.findall(r"([\d.e+-]+) of [\d.e+-]+ kWh energy are spent", done.stderr)  # the last one ended the job
        over = float(told[-1]) * 3.6e6 - limit_kwh * 3.6e6
        yield Note(
            text=f"account: {spent.num_steps} steps of 4 ranks: the parts of the account are "
            f"{parts_j / counted_j - 1:+.3%} and the ranks' shares {sum(spent.by_rank.values()) / counted_j - 1:+.3%} "
            "off what the counter grew by"
        )
        yield Note(
            text=f"account: a budget of {limit_kwh * 3.6e6:.0f} J was found spent {over:.1f} J late; an interval of "
            f"0.5 s took at most {0.5 * spent.peak_w:.1f} J"
        )


_RUN = (sys.executable, "-m", "torsh_distributed.cli.entry_point", "run")


def _kills(budget: Budget) -> Iterator[Note]:
    """Launchers that have set a limit are killed after a random time; their guardians put back what was found."""
    num, together = (4, 2) if budget.is_quick else (100, 5)
    draw, restored, limited = random.Random(5), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stay.py").write_text("import threading\nthreading.Event().wait(120)\n")
        (folder / "plan.toml").write_text("[green]\nenabled = true\ngpu_limit_w = 400.0\n")
        gpus = [StandIn(folder / f"nvml-{number}") for number in range(together)]
        for _ in range(num // together):
            jobs = []
            for gpu in gpus:
                gpu.write("energy-0", 0)
                gpu.write("limit-0", 650_000)
                command = [*_RUN, "--plan", str(folder / "plan.toml"), str(folder / "stay.py")]
                jobs.append(subprocess.Popen(command, env={**os.environ, **gpu.variables}, stderr=subprocess.DEVNULL))
            for job, gpu in zip(jobs, gpus, strict=True):
                limited += _until(gpu, 400_000, 60.0)
                threading.Event().wait(draw.random() * 0.2)
                job.send_signal(signal.SIGKILL)
                job.wait()
            restored += sum(_until(gpu, 650_000, 60.0) for gpu in gpus)
    yield Note(text=f"kills of the launcher: the limit was set in {limited} and put back in {restored} of {num} jobs")


def _until(gpu: StandIn, limit_mw: int, timeout_s: float) -> bool:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while gpu.read("limit-0") != limit_mw:
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True


# What metering costs


def _overhead(budget: Budget) -> Iterator[Row | Note]:
    """Blocks of steps in turns: bare, and with our meter on a thread of the same process."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(64, 256)

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / count

    block(50)
    num_blocks, count = (3, 50) if budget.is_quick else (30, max(50, round(1.2 / block(200))))
    bare, ours = list[float](), list[float]()
    for _ in range(num_blocks):
        bare.append(block(count))
        with JobMeter(GreenConfig(enabled=True, interval_s=0.5), ranks=[0], node=0, send=lambda record: None):
            ours.append(block(count))
    pairs = [with_it / without - 1 for with_it, without in zip(ours, bare, strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    yield Note(
        text=f"overhead: our meter in the training process: {statistics.median(pairs):+.3%} of a step (± {error:.3%})"
    )
    yield Row(name="one step", unit=Unit.SECONDS, ours=Measurement.of(ours), rivals={"no meter": Measurement.of(bare)})


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if budget.wants("replay"):
        yield from _replays(budget)
    if budget.wants("account"):
        yield from _arithmetic()
        yield from _job(budget)
    if budget.wants("kills"):
        yield from _kills(budget)
    if budget.wants("overhead"):
        yield from _overhead(budget)


CASE = Case(
    title="Energy and carbon: schedules, budgets, limits",
    about="""Replay of 48-hour jobs that have 96 hours and one or two workers (the second adds 0.9), from 200 starts
    in a year of hourly intensities: grams of the policy, which decides every hour on a forecast whose error
    grows from 4 to 16 % over two days and which knows nothing further, against the plan that knows the
    future. The two years are synthetic, with the daily shape, the mean and the weather of their names;
    traces in `benchmarks/traces` are replayed beside them. Then, on a stand-in for the driver's library:
    four ranks against the counter, a budget, and launchers that are killed while they limit a GPU; last the
    cost of our meter in a training process, in turns.""",
    rows=_rows,
    parts=("replay", "account", "kills", "overhead"),
)
