"""How often the risk score is right: runs that end in a failure, and runs that do not, recorded and then scored."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.rank_risk import RankRisks
from torsh_distributed.observe.job.run_files import EventFiles

_HORIZON_S = 5.0
"""Runs of a quarter of a minute are to be warned of seconds before, where real ones are minutes before."""
_ILL = {"leak": "memory", "slowing": "slowing"}
"""Runs in which rank 1 fails in the end, and the trend that tells."""
_WELL = ("steady", "noisy", "filling")
"""Runs without a failure: an even load, a jumpy one with pauses, and caches that fill up and stay."""
_PER_KIND = 6
_LIMIT_S = 120.0

_SCRIPT = """
import os, random, resource, sys, time, torch
import torsh_distributed as td

kind, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
source = random.Random(seed)
rank = int(os.environ["RANK"])
plan = td.Plan.from_dict({"training": {"steps": 10**6, "batch_size": 16}})
td.init(plan)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
engine = td.parallelize(model, torch.optim.AdamW(model.parameters()), plan, loss_fn=torch.nn.functional.mse_loss)
kept, start, worked = [], time.monotonic(), torch.ones(96, 96)
lasts = seconds * source.uniform(0.8, 1.2)

def work(amount):  # about `amount` ms of computing, more if the machine is busy
    for _ in range(int(amount * 12)):
        worked @ worked

def in_forward(*_):
    age = (time.monotonic() - start) / lasts
    amount = 20 * source.uniform(0.9, 1.1)
    if kind == "noisy":
        amount *= source.choice((0.7, 1.0, 1.0, 1.5))
        if source.random() < 0.02:
            time.sleep(0.2)
    if kind == "slowing" and rank == 1:
        amount *= 1 + 2 * max(0.0, age - 0.3)
    work(amount)
    if kind == "leak" and rank == 1 or kind == "filling" and age < 0.5:
        while len(kept) / 2 < 30 * (time.monotonic() - start):  # 30 MiB in a second, in halves of one
            kept.append(torch.ones(int(2**17 * source.uniform(0.5, 1.5))))

engine.unwrapped.register_forward_pre_hook(in_forward)
if kind == "leak" and rank == 1:
    used = int(open("/proc/self/statm").read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(seconds * source.uniform(35, 55)) * 2**20,) * 2)
inputs = torch.randn(1600, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
for batch in engine.batches(torch.utils.data.DataLoader(data, batch_size=16)):
    engine.step(batch)
    over = torch.tensor(float(kind != "leak" and time.monotonic() - start > lasts))
    if td.all_reduce(over, op="max") > 0:
        break
if kind == "slowing" and rank == 1:
    raise RuntimeError("too slow to go on")
td.destroy_process_group()
"""


@dataclass(frozen=True)
class _Verdict:
    """What the score said of one run."""

    kind: str
    warned_s: float | None
    """For a run that failed: seconds from the alarm on the right rank, for the right reason, to the last event."""
    num_false: int
    """Alarms on ranks that did not fail, or for another reason."""
    has_failed: bool


def _run(kind: str, seed: int, seconds: float) -> _Verdict:
    with tempfile.TemporaryDirectory(prefix="torsh-risk-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "train.py").write_text(_SCRIPT)
        command = [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", str(folder / "train.py")]
        done = subprocess.run(
            [*command, kind, str(seed), str(seconds)],
            env={**os.environ, "TORSH_EVENTS_DIR": str(folder / "events"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        if (done.returncode != 0) != (kind in _ILL):
            raise RuntimeError(f"{kind} {seed}: exit code {done.returncode}\n{done.stdout}{done.stderr}"[-3000:])
        view = JobView()
        view.risks = RankRisks(horizon_s=_HORIZON_S)
        # Through the view that a page shows, in the order in which a rank tells.
        found = list(EventFiles(folder / "events", view).read_all().risks.alarms.values())
        lines = (folder / "events" / "rank-1.jsonl").read_text().splitlines()
        end = float(json.loads(lines[-1])["time"])
        right = [one for one in found if one.rank == 1 and one.reason == _ILL.get(kind)]
        return _Verdict(kind, end - right[0].time if right else None, len(found) - len(right), kind in _ILL)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    wanted = [("leak", 0), ("steady", 0)]
    if not budget.is_quick:
        wanted = [(kind, seed) for seed in range(_PER_KIND) for kind in (*_ILL, *_WELL)]
    seconds = 10.0 if budget.is_quick else 12.0
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        found = list(pool.map(lambda one: _run(*one, seconds), wanted))
    for kind in dict.fromkeys(one.kind for one in found if one.has_failed):
        warned = [one.warned_s for one in found if one.kind == kind and one.warned_s is not None]
        if warned:
            yield Row(name=f"{kind}: alarm before the failure", unit=Unit.SECONDS, ours=Measurement.of(warned))
    for name, kinds in {"all": (*_ILL, *_WELL), **{kind: (kind,) for kind in (*_ILL, *_WELL)}}.items():
        runs = [one for one in found if one.kind in kinds]
        if runs:
            yield Note(text=f"{name}: {_hit_rate(runs)}")


def _hit_rate(runs: Sequence[_Verdict]) -> str:
    """Recall over runs, precision over alarms: on the rank that fails, for what it fails of, before it does."""
    ill = [one for one in runs if one.has_failed]
    warned = [one.warned_s for one in ill if one.warned_s is not None]
    num_false, num_well = sum(one.num_false for one in runs), len(runs) - len(ill)
    parts = []
    if ill:
        parts.append(f"recall {len(warned)} of {len(ill)} runs that failed")
    if warned or num_false:
        parts.append(f"precision {len(warned)} of {len(warned) + num_false} alarms")
    if warned:
        parts.append(f"{statistics.median(warned):.1f} s before the failure in the median")
    if num_well:
        wrong = sum(one.num_false > 0 for one in runs if not one.has_failed)
        parts.append(f"{wrong} of {num_well} runs that went well had an alarm")
    return ", ".join(parts)


CASE = Case(
    title="Risk score: how often it is right",
    about="""Real runs of two ranks with an Engine, recorded and scored afterwards. In some, rank 1 leaks memory until
    its limit ends it, or gets more than twice as slow and gives up; others go well: an even load, a jumpy one with
    pauses, caches that fill up. An alarm is a score of 0.7 or more. A number is the time from the alarm to the failure:
    more is better.""",
    rows=_rows,
)
