"""Faults as data: `kill rank 2 at step 5` is a value, with a text form that parses back.

Inside a rank, `strike(faults, step=…)` marks the points where a fault may happen; scripts that a launcher starts find
their faults in the environment. From outside, `wait_for_mark` waits until a rank has reached a point, and `kill`,
`stop` and `resume` act on its pid and return when the kernel has done it.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from typing_extensions import override

FAULTS_VARIABLE = "TORSH_TEST_FAULTS"
EXIT_CODE = 17


class Kind(StrEnum):
    """What happens to the rank."""

    KILL = "kill"
    """SIGKILL: no handler runs, as when the kernel is out of memory."""
    STOP = "stop"
    """SIGSTOP: sockets stay open, nothing answers; continues after `seconds`, if given."""
    EXIT = "exit"
    """sys.exit(17): atexit handlers run."""
    SEGFAULT = "segfault"
    """A read through a null pointer."""
    RAISE = "raise"
    """InjectedFault, an exception that no code expects."""
    DELAY = "delay"
    """Sleep for `seconds`: a slow rank, alive and answering."""


class InjectedFault(Exception):
    """Raised by a fault of kind `raise`."""


_SHAPE = re.compile(
    rf"(?P<kind>{'|'.join(Kind)}) rank (?P<rank>\d+) at step (?P<step>\d+)"
    r"(?: in (?P<point>[a-z_]+))?(?: of attempt (?P<attempt>\d+))?(?: for (?P<seconds>\d+(?:\.\d+)?) s)?"
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: its kind, rank, step, and the point in the step.

    `attempt` counts the launcher's restarts from 0: a fault affects one attempt, so the next can succeed.
    """

    kind: Kind
    rank: int
    step: int
    point: str = ""
    attempt: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind is Kind.DELAY and self.seconds is None:
            raise ValueError(f"say for how long: `{self} for 0.5 s`")
        if self.seconds is not None and self.kind not in (Kind.STOP, Kind.DELAY):
            raise ValueError(f"a {self.kind} has no duration: {self}")

    @override
    def __str__(self) -> str:
        text = f"{self.kind} rank {self.rank} at step {self.step}"
        text += f" in {self.point}" if self.point else ""
        text += f" of attempt {self.attempt}" if self.attempt else ""
        return text + (f" for {self.seconds:f} s" if self.seconds is not None else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The fault described by the text, as `str` prints it."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"not a fault: {text!r}; write `kill rank 2 at step 5 [in POINT] [of attempt N] [for X s]`"
            )
        return cls(
            kind=Kind(match["kind"]),
            rank=int(match["rank"]),
            step=int(match["step"]),
            point=match["point"] or "",
            attempt=int(match["attempt"] or 0),
            seconds=None if match["seconds"] is None else float(match["seconds"]),
        )


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults separated by semicolons."""
    return tuple(Fault.parse(part) for part in text.split(";") if part.strip())


def faults_environment(*faults: Fault | str) -> dict[str, str]:
    """The variable that passes faults to a launched script: `env={**os.environ, **faults_environment(…)}`."""
    text = "; ".join(map(str, faults))
    parse_faults(text)
    return {FAULTS_VARIABLE: text}


def faults_from_environment() -> tuple[Fault, ...]:
    """The faults that the test passed to this script, if any."""
    return parse_faults(os.environ.get(FAULTS_VARIABLE, ""))


def random_faults(
    seed: int, *, num_faults: int, num_ranks: int, num_steps: int, kinds: Sequence[Kind] = (Kind.KILL, Kind.STOP)
) -> tuple[Fault, ...]:
    """Faults at random ranks and steps, the same for the same seed; at most one per rank and step."""
    source = random.Random(seed)
    places = source.sample([(rank, step) for rank in range(num_ranks) for step in range(num_steps)], num_faults)
    return tuple(Fault(kind=source.choice(kinds), rank=rank, step=step) for rank, step in sorted(places))


# ---- from inside --------------------------------------------------------------------------------------------


def strike(faults: Iterable[Fault], *, step: int, point: str = "") -> None:
    """Apply the faults for this rank, step and point, usually none.

    To hit a rank in the middle of a collective, start it with `async_op=True` and strike before waiting.
    """
    here = (int(os.environ["RANK"]), step, point, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    for fault in faults:
        if (fault.rank, fault.step, fault.point, fault.attempt) == here:
            print(f"fault: {fault}", file=sys.stderr, flush=True)
            _inflict(fault)


def _inflict(fault: Fault) -> None:
    match fault.kind:
        case Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.STOP:
            _stop_self(fault.seconds)
        case Kind.EXIT:
            sys.exit(EXIT_CODE)
        case Kind.SEGFAULT:
            ctypes.string_at(0)
        case Kind.RAISE:
            raise InjectedFault(str(fault))
        case Kind.DELAY:
            assert fault.seconds is not None
            time.sleep(fault.seconds)


def _stop_self(seconds: float | None) -> None:
    if seconds is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    # A stopped process cannot wake itself. The helper starts counting when it sees the stop.
    wake = (
        f'while ! grep -q "^State:.T" /proc/{os.getpid()}/status; do sleep 0.01; done; '
        f"sleep {seconds:f}; kill -CONT {os.getpid()}"
    )
    with subprocess.Popen(["sh", "-c", wake]):
        os.kill(os.getpid(), signal.SIGSTOP)


def mark(folder: Path, *, step: int) -> None:
    """Record that this rank has reached `step`, for `wait_for_mark`."""
    path = folder / f"rank-{os.environ['RANK']}-step-{step}"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(path)


# ---- from outside -------------------------------------------------------------------------------------------


def wait_for_mark(folder: Path, *, rank: int, step: int, within_s: float = 20.0) -> int:
    """Wait until the rank has reached the step; returns its pid."""
    path = folder / f"rank-{rank}-step-{step}"
    _poll(path.exists, within_s, f"rank {rank} did not reach step {step}")
    return int(path.read_text())


def kill(pid: int, *, within_s: float = 10.0) -> None:
    """SIGKILL; returns when the process has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], within_s)[0]:
            raise TimeoutError(f"process {pid} did not end within {within_s} s of SIGKILL")
    finally:
        os.close(pidfd)


def stop(pid: int, *, within_s: float = 10.0) -> None:
    """SIGSTOP; returns when every thread of the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    _poll(lambda: process_state(pid) == "T", within_s, f"process {pid} did not stop")


def resume(pid: int, *, within_s: float = 10.0) -> None:
    """SIGCONT; returns when the process runs again or has ended."""
    os.kill(pid, signal.SIGCONT)
    _poll(lambda: process_state(pid) != "T", within_s, f"process {pid} did not continue")


def process_state(pid: int) -> str | None:
    """The kernel's letter: R running, S sleeping, T stopped, Z zombie; None once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _poll(condition: Callable[[], bool], within_s: float, complaint: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{complaint} within {within_s} s")
        time.sleep(0.005)
