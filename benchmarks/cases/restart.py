"""How fast a job recovers from a killed worker: `torsh run` against torchrun, with the same plain torch script."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit

_LIMIT_S = 60.0
_TRAINS_S = 6.0
"""Until the kill, where it is to find a warm spare."""
_SCRIPT = """
import os, signal, sys, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt:
    print(f"started {time.time()}", flush=True)
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
time.sleep(0 if attempt else float(sys.argv[1]))
for step in range(5):
    if attempt == 0 and step == 3 and rank == 1:
        print(f"killed {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000))
    if attempt and step == 0:
        print(f"reduced {time.time()}", flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class _Recovery:
    """Seconds from the kill until all workers ran again, and until all had done a collective (None: never)."""

    ending: str
    started_s: float | None
    reduced_s: float | None


def _recover(launcher: list[str], script: Path, *, num_workers: int, trains_s: float) -> _Recovery:
    options = ["--nproc-per-node", str(num_workers), "--max-restarts", "1"]
    command = [sys.executable, "-m", *launcher, *options, str(script), str(trains_s)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
        ending = f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        # Its workers have their own sessions; on SIGTERM the launcher ends them.
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=_LIMIT_S)
        ending = f"was still not back after {_LIMIT_S:g} s"
    times = {
        name: [float(text) for text in re.findall(rf"{name} (\d+\.\d+)", output)]
        for name in ("killed", "started", "reduced")
    }
    if not times["killed"]:
        raise RuntimeError(f"`{' '.join(command)}` did not reach the kill:\n{output[-2000:]}")

    def after_kill(name: str) -> float | None:
        return max(times[name]) - times["killed"][0] if len(times[name]) == num_workers else None

    return _Recovery(ending=ending, started_s=after_kill("started"), reduced_s=after_kill("reduced"))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _row(name: str, ours: list[float | None], rivals: dict[str, list[float | None]]) -> Row | Note:
    measured = {
        who: Measurement.of([value for value in values if value is not None])
        for who, values in {"": ours, **rivals}.items()
        if values and all(value is not None for value in values)
    }
    if "" not in measured:
        return Note(text=f"{name}: torsh run did not recover every time")
    return Row(name=name, unit=Unit.SECONDS, ours=measured.pop(""), rivals=measured)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    yield from _recoveries(budget, "two workers, killed at once", num_workers=2, trains_s=0.0)
    yield from _recoveries(budget, "four workers, killed later", num_workers=4, trains_s=_TRAINS_S)


def _recoveries(budget: Budget, name: str, *, num_workers: int, trains_s: float) -> Iterator[Row | Note]:
    num_samples = 1 if budget.is_quick else 5
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(_SCRIPT)
        ours: list[_Recovery] = []
        rivals: dict[str, list[_Recovery]] = {"torchrun": [], "torchrun --standalone": []}
        for sample in range(num_samples):
            job = partial(_recover, script=script, num_workers=num_workers, trains_s=trains_s)
            ours.append(job(["torsh_distributed.run"]))
            static = ["torch.distributed.run", "--master-port", str(_free_port())]
            rivals["torchrun"].append(job(static))
            # This one runs into its limit; once is enough.
            if sample == 0 and not budget.is_quick:
                rivals["torchrun --standalone"].append(job(["torch.distributed.run", "--standalone"]))
    yield _row(
        f"{name}: until all workers run again",
        [recovery.started_s for recovery in ours],
        {who: [recovery.started_s for recovery in found] for who, found in rivals.items()},
    )
    yield _row(
        f"{name}: until the first collective",
        [recovery.reduced_s for recovery in ours],
        {who: [recovery.reduced_s for recovery in found] for who, found in rivals.items()},
    )
    for who, found in rivals.items():
        lost = [recovery for recovery in found if recovery.reduced_s is None]
        if lost:
            yield Note(text=f"{name}: {who} did not recover in {len(lost)} of {len(found)} runs: it {lost[0].ending}")


CASE = Case(
    title="Restart: a worker is killed in mid-training",
    about="""Workers run a plain torch script on gloo under --max-restarts 1; rank 1 kills itself with SIGKILL at its
    fourth step, which is done at once, or after six seconds, when the launcher has a warm spare. Seconds from the kill
    until all workers of the second attempt execute their first line, and until all have done an all-reduce (without a
    spare, importing torch is most of that). torchrun gets 60 s.""",
    rows=_rows,
)
