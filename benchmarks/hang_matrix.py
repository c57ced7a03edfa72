"""Hangs on purpose: a plain torch script in which rank 1 keeps the others waiting, and what the doctor says about it.

Every hang is a branch of one script, run by `torsh run` with a short deadline. While the ranks wait, the launcher is
asked as `torsh doctor --pid` asks it; then the deadline passes, and its report is read as it comes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.errors import TorshError
from torsh_distributed.launch.control.job_commands import ask_launcher

VICTIM = 1
BACKENDS = ("gloo", "shm", "torsh")
DEADLINE_S = 7.0
_ASK_AFTER_S = 2.5
_LIMIT_S = 90.0
_BEFORE = 8  # operations before the fifth step

SCRIPT = """\
import os, queue, re, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

hang, backend, deadline_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank = int(os.environ["RANK"])
is_victim = rank == 1

def mark():
    print(f"hang {time.time()}", flush=True)

def grads(numel=1000):
    dist.all_reduce(torch.ones(numel))

def loss():
    dist.all_reduce(torch.ones(1))

def save_checkpoint():
    dist.barrier()

def export_weights():
    os.mkfifo("weights.pt")
    torch.save({"weights": torch.ones(10)}, "weights.pt")

def load_batch():
    queue.Queue().get()

def recover():
    time.sleep(1000)

def step(number):
    if number == 4 and is_victim:
        mark()
        if hang == "save on one rank":
            save_checkpoint()
        elif hang == "long save":
            export_weights()
        elif hang == "loader waits":
            load_batch()
        elif hang == "swallowed exception":
            try:
                raise ValueError("the batch is broken")
            except ValueError:
                pass
            loss()
            return
        elif hang == "exception handler":
            try:
                raise ValueError("the batch is broken")
            except ValueError:
                recover()
        elif hang == "other shape":
            grads(500)
        elif hang == "other order":
            loss()
            grads()
            return
        elif hang == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif hang == "native code":
            re.match("(a+)+$", "a" * 50 + "b")  # years, without giving back the lock
        elif hang == "endless loop":
            while True:
                pass
        elif hang == "lock":
            held = threading.Lock()
            threading.Thread(target=held.acquire).start()
            time.sleep(0.1)
            held.acquire()
    if number == 4 and hang == "missing send" and rank == 0:
        dist.recv(torch.ones(10), src=1)
    grads()
    loss()

def train():
    is_short = is_victim and hang.startswith("short loader")
    for number in range(4 if is_short else 8):
        step(number)
    if is_short:
        mark()
    if hang == "short loader, then barrier":
        dist.barrier()

def deadlock():
    ranks = list(range(dist.get_world_size()))
    limit = timedelta(seconds=deadline_s)
    one, other = dist.new_group(ranks, timeout=limit), dist.new_group(ranks, timeout=limit)
    for number in range(8):
        if number == 4 and is_victim:
            mark()
        for group in (other, one) if number == 4 and is_victim else (one, other):
            dist.all_reduce(torch.ones(1000), group=group)

dist.init_process_group(backend, timeout=timedelta(seconds=deadline_s))
deadlock() if hang == "deadlock of two groups" else train()
dist.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """What rank 1 does, and which causes are right."""

    name: str
    kinds: tuple[str, ...]
    """The doctor's word for the cause; the first is the best, the others are true too."""
    words: str
    """A pattern that says the same in the launcher's report, where a backend ends the job before it can be asked."""


HANGS = (
    Hang(name="save on one rank", kinds=("branch", "save"), words="branch|calls barrier"),
    Hang(name="long save", kinds=("save",), words="it saves"),
    Hang(name="short loader", kinds=("ended",), words="ended normally"),
    Hang(name="short loader, then barrier", kinds=("branch", "skipped"), words="branch|skipped|calls barrier"),
    Hang(name="loader waits", kinds=("input",), words="next batch"),
    Hang(name="swallowed exception", kinds=("skipped",), words="skipped"),
    Hang(name="exception handler", kinds=("exception",), words="`except` block: ValueError: the batch is broken"),
    Hang(name="other shape", kinds=("shape",), words="another size"),
    Hang(name="other order", kinds=("skipped",), words="skipped .* or calls in another order"),
    Hang(name="stopped", kinds=("stopped",), words="stopped"),
    Hang(name="native code", kinds=("native",), words="holds Python's lock"),
    Hang(name="endless loop", kinds=("compute",), words="computes"),
    Hang(name="deadlock of two groups", kinds=("deadlock",), words="two groups in different orders"),
    Hang(name="lock", kinds=("lock",), words="waits for a lock"),
    Hang(name="missing send", kinds=("message",), words="send"),
)


@dataclass(frozen=True, kw_only=True)
class HangOutcome:
    """What was said about one hang."""

    is_right_rank: bool
    is_right_call: bool
    is_right_cause: bool
    answer_s: float | None
    """Seconds until the doctor answered, if it could be asked."""
    verdict_s: float | None
    """Seconds from the deadline to the launcher's report; below zero if it came before."""
    said: dict[str, Any] | None
    """The doctor's answer."""
    output: str

    @property
    def is_right(self) -> bool:
        """Whether rank, collective and cause are right."""
        return self.is_right_rank and self.is_right_call and self.is_right_cause


def run_hang(
    hang: Hang, backend: str, num_ranks: int, folder: Path, *, deadline_s: float = DEADLINE_S, waits: bool = True
) -> HangOutcome:
    """Run one job with the hang; with `waits` until its deadline ends it, else until the doctor has answered."""
    (folder / "train.py").write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", str(num_ranks)),
        *("train.py", hang.name, backend, str(deadline_s)),
    ]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    lines: list[tuple[float, str]] = []
    asked: dict[str, Any] = {}
    askers: list[threading.Thread] = []
    limit = threading.Timer(_LIMIT_S, lambda: os.kill(process.pid, signal.SIGTERM))
    limit.start()
    try:
        for line in process.stdout:
            lines.append((time.time(), line))
            if line.startswith(f"[rank {VICTIM}] hang "):
                askers.append(threading.Thread(target=_ask, args=(process.pid, asked, waits)))
                askers[-1].start()
        process.wait()
    finally:
        limit.cancel()
        process.stdout.close()
        for asker in askers:
            asker.join()
    return _judge(hang, lines, asked, deadline_s)


def _ask(pid: int, asked: dict[str, Any], waits: bool) -> None:
    time.sleep(_ASK_AFTER_S)
    started_s = time.monotonic()
    try:
        asked["said"] = ask_launcher(pid, "diagnosis")
        asked["answer_s"] = time.monotonic() - started_s
    except TorshError as error:  # the job has ended: its report is judged
        asked["error"] = str(error)
    if not waits:
        os.kill(pid, signal.SIGTERM)


def _judge(hang: Hang, lines: list[tuple[float, str]], asked: dict[str, Any], deadline_s: float) -> HangOutcome:
    output = "".join(line for _, line in lines)
    report = "".join(line for _, line in lines if not line.startswith("[rank"))
    began = re.search(rf"^\[rank {VICTIM}\] hang (\d+\.\d+)$", output, re.MULTILINE)
    told = [
        at for at, line in lines if "failed first" in line or ("Error: " in line and line.startswith("torsh run: "))
    ]
    verdict_s = told[0] - float(began.group(1)) - deadline_s if told and began is not None else None
    said = asked.get("said")
    if said is not None and said["rank"] is not None:
        cause = said["cause"]["kind"] if said["cause"] else None
        return HangOutcome(
            is_right_rank=said["rank"] == VICTIM,
            is_right_call=_is_right_call(hang, said),
            is_right_cause=cause in hang.kinds,
            answer_s=asked["answer_s"],
            verdict_s=verdict_s,
            said=said,
            output=output,
        )
    return HangOutcome(
        is_right_rank=re.search(rf"rank {VICTIM} failed first|rank {VICTIM} calls", report) is not None,
        is_right_call=re.search(rf"all_reduce|#{_BEFORE + 1}\b", report) is not None,
        is_right_cause=re.search(hang.words, report) is not None,
        answer_s=asked.get("answer_s"),
        verdict_s=verdict_s,
        said=said,
        output=output,
    )


def _is_right_call(hang: Hang, said: dict[str, Any]) -> bool:
    """The first collective of the fifth step, where the others wait."""
    if hang.name == "missing send":
        return said["operation"] in ("recv", "all_reduce")
    if hang.name == "deadlock of two groups":
        return bool(said["operation"] == "all_reduce" and said["num_bytes"] in (4000, None))
    return bool(
        said["operation"] == "all_reduce" and said["sequence"] == _BEFORE + 1 and said["num_bytes"] in (4000, None)
    )


if __name__ == "__main__":
    import tempfile

    names, backends, sizes = (
        sys.argv[1].split("|"),
        sys.argv[2].split(","),
        [int(one) for one in sys.argv[3].split(",")],
    )
    for one in HANGS:
        for backend in backends:
            for num_ranks in sizes:
                if names != ["all"] and one.name not in names:
                    continue
                with tempfile.TemporaryDirectory(prefix="torsh-hangs-") as root:
                    found = run_hang(one, backend, num_ranks, Path(root))
                marks = "".join("·X"[not ok] for ok in (found.is_right_rank, found.is_right_call, found.is_right_cause))
                times = [None if t is None else round(t, 2) for t in (found.answer_s, found.verdict_s)]
                print(
                    f"{marks} {one.name}, {backend}, {num_ranks}: {times} {(found.said or {}).get('text', '')}",
                    flush=True,
                )
                if not found.is_right or len(sys.argv) > 4:
                    print(found.output, flush=True)
