"""Faults on purpose: a job in which rank 1 does one thing wrong, and whether the launcher names it and why.

Every fault is a branch of one script, run by `torsh run` on a backend and a number of ranks. The script prints the time
of the fault; what the launcher says is read as it comes, so the time to its verdict is known. A fault is repeated by
`--max-restarts`: each attempt is a new set of workers, a new group and a new report, and from the third on the workers
come from the launcher's warm spare, so a repetition takes less than a second where a job of its own takes five.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VICTIM = 1
BACKENDS = ("gloo", "shm", "torsh", "mpi4py")
_LIMIT_S = 90.0
# Where the launcher only tells of a wait, the next attempt begins when rank 1 gives up.
_PATIENCE_S = 6.0
_MEMORY_BYTES = 768 << 20

SCRIPT = """\
import ctypes, os, signal, sys, time
fault, backend, patience_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank = int(os.environ["RANK"])
is_victim = rank == 1

def mark():
    print(f"fault {time.time()}", flush=True)
    if patience_s:
        import threading
        timer = threading.Timer(patience_s, os._exit, [3])
        timer.daemon = True
        timer.start()

if fault == "import error" and is_victim:
    mark()
    import a_module_that_is_not_there

import torch
import torsh_distributed as td

def hoard():
    open("/proc/self/oom_score_adj", "w").write("1000")
    kept = []
    while True:
        kept.append(bytearray(b"x" * (64 << 20)))

def grads():
    td.all_reduce(torch.ones(1000))

def loss():
    td.all_reduce(torch.ones(1))

def step(number):
    if number != 4 or not is_victim:
        grads()
        loss()
        return
    if fault in ("exception", "exception, finally destroy"):
        grads()
        mark()
        raise ValueError("the batch is broken")
    if fault == "exit 0":
        mark()
        sys.exit(0)
    if fault == "exit 7":
        mark()
        sys.exit(7)
    if fault == "SIGKILL":
        mark()
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "SIGSEGV":
        mark()
        ctypes.string_at(0)
    if fault == "out of memory":
        mark()
        hoard()
    mark()
    if fault == "skipped collective":
        loss()
    if fault == "other shape":
        td.all_reduce(torch.ones(500))
        loss()
    if fault == "other order":
        loss()
        grads()

def train():
    for number in range(8):
        step(number)

def uneven():
    for number in range(4 if is_victim else 8):
        grads()
        loss()
    if is_victim:
        mark()

def deadlock():
    import torch.distributed as dist
    ranks = list(range(td.world_size()))
    one, other = dist.new_group(ranks), dist.new_group(ranks)
    for number in range(8):
        pair = (other, one) if number == 4 and is_victim else (one, other)
        if number == 4 and is_victim:
            mark()
        for group in pair:
            td.all_reduce(torch.ones(10), group=group)

def not_finite():
    import functools
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    engine = td.parallelize(
        model, functools.partial(torch.optim.SGD, lr=0.01), td.Plan(), loss_fn=torch.nn.functional.mse_loss
    )
    for number in range(8):
        points = torch.randn(4, 4)
        if number == 4 and is_victim:
            points[0, 0] = float("nan")
            mark()
        engine.step((points, points.sum(dim=1, keepdim=True)))

bodies = {"uneven loaders": uneven, "deadlock of two groups": deadlock, "NaN on one rank": not_finite}
body = bodies.get(fault, train)
td.init(backend=backend, timeout_s=60.0)
if fault == "exception, finally destroy":
    try:
        body()
    finally:
        td.destroy_process_group()
else:
    body()
    td.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong on rank 1, and what the launcher has to say about it."""

    name: str
    rank: str
    """A pattern that names the rank in the launcher's words."""
    cause: str
    """A pattern that names the cause."""
    is_timed: bool = True
    """Whether the script knows when the fault happens."""
    is_wait: bool = False
    """Whether ranks may wait for ever, on some backends: the launcher's word comes while the job still runs."""


_RAISED_BY_VICTIM = r"\n  rank 1\b"
_FAILED_FIRST = r"rank 1 failed first: "
_RESTART = re.compile(r"torsh run: restart \d+ of \d+: ")
_DIFFERENT = r"ranks went different ways at operation #\d+: rank 1 calls all_reduce"

_OTHERS = r"ranks? [023, and]+ calls? all_reduce of 4000 bytes at worker\.py:"
_ENDED = r"ended normally .*while ranks? [023, and]+ waited in all_reduce"

FAULTS = (
    Fault(
        name="exception",
        rank=_RAISED_BY_VICTIM,
        cause=r"torsh run: worker\.py:\d+ in step: ValueError: the batch is broken\n",
    ),
    Fault(
        name="exception, finally destroy",
        rank=_RAISED_BY_VICTIM,
        cause=r"torsh run: worker\.py:\d+ in step: ValueError: the batch is broken\n",
    ),
    Fault(name="exit 0", rank=_FAILED_FIRST, cause=_ENDED),
    Fault(name="exit 7", rank=_FAILED_FIRST, cause=r"failed first: exit code 7 at worker\.py:\d+ in step\n"),
    Fault(name="SIGKILL", rank=_FAILED_FIRST, cause=r"failed first: signal 9 \(SIGKILL, killed\)\n(?!(.*\n)*.*memory)"),
    Fault(name="SIGSEGV", rank=_FAILED_FIRST, cause=r"signal 11 \(SIGSEGV, .*\) at worker\.py:\d+ in step"),
    Fault(name="out of memory", rank=_FAILED_FIRST, cause=r"SIGKILL(.*\n)+  proof: out of memory", is_timed=False),
    Fault(name="skipped collective", rank=_DIFFERENT, cause=_OTHERS, is_wait=True),
    Fault(name="other shape", rank=_DIFFERENT, cause=_OTHERS, is_wait=True),
    Fault(name="other order", rank=_DIFFERENT, cause=_OTHERS, is_wait=True),
    Fault(
        name="uneven loaders",
        rank=_FAILED_FIRST,
        cause=_ENDED,
    ),
    Fault(
        name="deadlock of two groups",
        rank=r"deadlock: .*rank 1 waits in all_reduce",
        cause=r"deadlock: .*on group .*on group",
        is_wait=True,
    ),
    Fault(name="NaN on one rank", rank=_RAISED_BY_VICTIM, cause=r"NonFiniteLoss: the loss of step 5 is nan"),
    Fault(
        name="import error",
        rank=_RAISED_BY_VICTIM,
        cause=r"torsh run: worker\.py:\d+: ModuleNotFoundError: No module named 'a_module_that_is_not_there'\n",
    ),
)


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """What the launcher said about one fault."""

    is_right_rank: bool
    is_right_cause: bool
    verdict_s: float | None
    """Seconds from the fault to the launcher's word."""
    output: str


def run_fault(fault: Fault, backend: str, num_ranks: int, folder: Path, *, num_runs: int = 1) -> list[FaultOutcome]:
    """Run a job with the fault, `num_runs` times by restarting its workers; what was said about each.

    The last attempt is interrupted once the launcher has said why ranks wait.
    """
    folder.mkdir(exist_ok=True)
    script = folder / "worker.py"
    script.write_text(SCRIPT)
    options = ["--nproc-per-node", str(num_ranks), "--max-restarts", str(num_runs - 1)]
    options += ["--mpi"] if backend == "mpi4py" else []
    patience_s = _PATIENCE_S if fault.is_wait and num_runs > 1 else 0.0
    arguments = [fault.name, backend, str(patience_s)]
    command = [sys.executable, "-m", "torsh_distributed.run", *options, "worker.py", *arguments]
    with _memory_group(num_ranks) if fault.name == "out of memory" else _no_group() as enter:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=enter,  # noqa: PLW1509 - a few system calls, to enter a control group
        )
        return _listen(process, fault, num_runs)


def _listen(process: subprocess.Popen[str], fault: Fault, num_runs: int) -> list[FaultOutcome]:
    assert process.stdout is not None
    attempts: list[list[tuple[float, str]]] = [[]]
    is_told = False
    limit = threading.Timer(_LIMIT_S + 10.0 * num_runs, lambda: os.kill(process.pid, signal.SIGTERM))
    limit.start()
    try:
        for line in process.stdout:
            if _RESTART.match(line):
                attempts.append([])
                is_told = False
                continue
            attempts[-1].append((time.time(), line))
            if _is_verdict(line, fault) and not is_told:
                is_told = True
                if len(attempts) == num_runs and fault.is_wait and "failed first" not in line and "ended" not in line:
                    # A word on a wait: the job would go on until its deadline.
                    os.kill(process.pid, signal.SIGINT)
        process.wait()
    finally:
        limit.cancel()
        process.stdout.close()
    outcomes = [_judge(lines, fault) for lines in attempts]
    # An attempt that did not come is a fault that nobody noticed.
    return outcomes + [_judge([], fault)] * (num_runs - len(outcomes))


def _judge(lines: list[tuple[float, str]], fault: Fault) -> FaultOutcome:
    output = "".join(line for _, line in lines)
    said = "".join(line for _, line in lines if not line.startswith("[rank"))
    marked = re.search(r"^\[rank 1\] fault (\d+\.\d+)$", output, re.MULTILINE)
    told = [at for at, line in lines if _is_verdict(line, fault)]
    verdict_s = told[0] - float(marked.group(1)) if marked is not None and told and fault.is_timed else None
    return FaultOutcome(
        is_right_rank=re.search(fault.rank, said) is not None,
        is_right_cause=re.search(fault.cause, said) is not None,
        verdict_s=verdict_s,
        output=output,
    )


def _is_verdict(line: str, fault: Fault) -> bool:
    """Whether a line is the launcher's word on the cause; on a wait only where a wait is the fault."""
    if not line.startswith("torsh run: ") or "OMP_" in line or "SIGINT" in line:
        return False
    return fault.is_wait or " waited " not in line or "failed first" in line


@contextmanager
def _no_group() -> Iterator[None]:
    yield None


@contextmanager
def _memory_group(num_ranks: int) -> Iterator[object]:
    """A control group with a memory limit for the whole job; yields the function that enters it."""
    path, limit = _new_group_paths()
    path.mkdir()
    try:
        limit.write_text(str((1 + num_ranks // 2) * _MEMORY_BYTES))
        yield lambda: (path / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        deadline = time.monotonic() + 10
        while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        path.rmdir()


def _new_group_paths() -> tuple[Path, Path]:
    """The folder of a new control group and its limit, for version 1 or 2."""
    from torsh_distributed.launch.local.exit_causes import find_oom_counter

    counter = find_oom_counter()
    name = f"torsh-faults-{os.getpid()}-{threading.get_ident()}"
    if counter is not None and counter.path.name == "memory.oom_control":
        path = counter.path.parent / name
        return path, path / "memory.limit_in_bytes"
    path = Path("/sys/fs/cgroup") / name
    return path, path / "memory.max"


def why_no_memory_group() -> str | None:
    """Why an out-of-memory kill cannot be made here without harm; None if it can."""
    path, limit = _new_group_paths()
    try:
        path.mkdir()
    except OSError as error:
        return f"no control group can be made: {error.strerror}"
    try:
        limit.write_text(str(_MEMORY_BYTES))
    except OSError as error:
        return f"no control group can have a memory limit: {error.strerror}"
    finally:
        path.rmdir()
    return None


def why_no_mpi() -> str | None:
    """Why the mpi4py backend cannot run here; None if it can."""
    from torsh_distributed.comm.backends.mpi.library import library
    from torsh_distributed.errors import TorshError

    try:
        library()
    except TorshError as error:
        return error.message
    return None


if __name__ == "__main__":
    chosen = next(fault for fault in FAULTS if fault.name == sys.argv[1])
    with tempfile.TemporaryDirectory() as one_folder:
        one_cell = run_fault(chosen, sys.argv[2], int(sys.argv[3]), Path(one_folder), num_runs=int(sys.argv[4]))
    for found in one_cell:
        print(found.output)
        print(found.is_right_rank, found.is_right_cause, found.verdict_s)
