"""Jobs in which faults happen: an Engine on four ranks under a launcher, its log of faults and steps, its samples.

The same script runs under `torsh run` and under torchrun. It checkpoints, so a launcher that restarts everybody loses a
few steps; every process notes the samples of each committed step, to be counted afterwards.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.cli.chaos import chaos_environment
from torsh_distributed.elastic.faults.fault import Fault
from torsh_distributed.elastic.faults.fault_log import FaultOutcome, fault_outcomes, read_fault_log
from torsh_distributed.events import SamplesEvent
from torsh_distributed.train.ledger.audit import EpochAudit, audit

NUM_RANKS = 4
NUM_SAMPLES = 512
_BATCH = 32
_LIMIT_S = 900.0

SCRIPT = f"""\
import functools, json, os, sys, time
import torch
import torsh_distributed as td

steps, folder, work_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
samples = os.open(f"{{folder}}-samples-{{os.getpid()}}", os.O_WRONLY | os.O_CREAT, 0o600)

def keep(event):  # at once: the process may not live long
    os.write(samples, (json.dumps(td.events.to_record(event)) + "\\n").encode())

td.events.subscribe(keep, td.events.SamplesEvent)
plan = td.Plan.from_dict({{
    "training": {{"steps": steps, "batch_size": {_BATCH}, "seed": 1, "exactly_once": True}},
    "checkpoint": {{"enabled": True, "dir": folder, "every_steps": 5, "keep": 2, "verify_after_save": False}},
}})
td.init(plan)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
engine = td.parallelize(
    model, functools.partial(torch.optim.AdamW, lr=1e-3), plan, loss_fn=torch.nn.functional.mse_loss
)
engine.resume()
points = torch.randn({NUM_SAMPLES}, 32, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
for batch in engine.batches(torch.utils.data.DataLoader(data, batch_size={_BATCH}, shuffle=True)):
    time.sleep(work_s)
    loss = engine.step(batch)
engine.checkpoints.close()
if td.rank() == 0:
    print(f"loss {{loss}}", flush=True)
td.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class ChaosRun:
    """How a job with faults went."""

    exit_code: int | None
    """None if it had to be ended."""
    outcomes: list[FaultOutcome]
    epochs: list[EpochAudit]
    num_steps: int
    seconds: float
    """From the first step to the last."""
    loss: float | None
    output: str


def launcher_options(launcher: str, *, restarts: int) -> list[str]:
    """The command line of a launcher, up to the script."""
    if launcher == "torchrun":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        base = ["torch.distributed.run", "--master-port", str(port)]
    else:
        base = ["torsh_distributed.run", *(["--elastic"] if launcher == "torsh run --elastic" else [])]
    return [sys.executable, "-m", *base, "--nproc-per-node", str(NUM_RANKS), "--max-restarts", str(restarts)]


def run_chaos(
    launcher: str,
    folder: Path,
    *,
    faults: Sequence[Fault] = (),
    num_steps: int,
    restarts: int = 0,
    work_s: float = 0.0,
    storm_s: float | None = None,
    lasts_s: float | None = None,
) -> ChaosRun:
    """Run the script with faults; with `storm_s`, a random worker is killed from outside that often.

    `lasts_s` ends the job after so long, for runs that are measured by what they did until then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script, log = folder / "train.py", folder / "faults.jsonl"
    script.write_text(SCRIPT)
    command = [
        *launcher_options(launcher, restarts=restarts),
        str(script),
        str(num_steps),
        str(folder / "ckpt"),
        str(work_s),
    ]
    env = {**chaos_environment(list(faults), log), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=env)
        code = _wait(process, log, storm_s=storm_s, lasts_s=lasts_s)
    records = read_fault_log(log)
    steps = [one for one in records if one["kind"] == "step"]
    text = (folder / "output").read_text()
    losses = [line.rpartition("loss ")[2] for line in text.splitlines() if "loss " in line]
    return ChaosRun(
        exit_code=code,
        outcomes=fault_outcomes(records),
        epochs=audit(_samples(folder)),
        num_steps=max((one["step"] for one in steps), default=0),
        seconds=steps[-1]["time"] - steps[0]["time"] if steps else 0.0,
        loss=float(losses[-1]) if code == 0 and losses else None,
        output=text,
    )


def _wait(process: subprocess.Popen[Any], log: Path, *, storm_s: float | None, lasts_s: float | None) -> int | None:
    """Wait for the job, and kill its workers meanwhile if there is a storm; None if it had to be ended."""
    source, started = random.Random(1), time.monotonic()
    first_step_at = next_kill = None
    while process.poll() is None:
        now = time.monotonic()
        if first_step_at is None and log.exists():
            first_step_at = now
            next_kill = None if storm_s is None else now + storm_s
        is_over = lasts_s is not None and first_step_at is not None and now - first_step_at > lasts_s
        if is_over or now - started > _LIMIT_S + (lasts_s or 0):
            os.kill(process.pid, signal.SIGTERM)
            process.wait(timeout=60)
            return None
        if next_kill is not None and storm_s is not None and now >= next_kill:
            next_kill += storm_s
            _kill_one(log, source)
        time.sleep(0.01)
    return process.returncode


def _kill_one(log: Path, source: random.Random) -> None:
    """SIGKILL a worker that has reported a step in the last second, and note it in the log."""
    now = time.time()
    recent = {(one["pid"], one["rank"], one["step"]) for one in read_fault_log(log) if now - one["time"] < 1.0}
    newest = {pid: (rank, step) for pid, rank, step in sorted(recent, key=lambda one: one[2])}
    if not newest:
        return
    pid = source.choice(sorted(newest))
    rank, step = newest[pid]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    record = {"time": time.time(), "rank": rank, "pid": pid, "kind": "fault", "step": step}
    with log.open("a") as file:
        file.write(json.dumps({**record, "fault": f"kill rank {rank} at step {step}"}) + "\n")


def _samples(folder: Path) -> list[SamplesEvent]:
    """What every process has reported; a line that a dying one did not finish is left out."""
    found = []
    for path in folder.glob("ckpt-samples-*"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                del record["type"]
                found.append(SamplesEvent(**{**record, "ids": tuple(record["ids"])}))
    return found
