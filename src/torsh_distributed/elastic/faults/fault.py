"""Faults as data: `kill rank 2 at step 5` is a value, with a text form that parses back.

    KIND rank R at step S [in POINT] [after X s] [of attempt N] [on TARGET] [to G gbps] [for X s]

A step is the number of updates done before it, so the first is 0. Imports no torch: the command line reads faults too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from typing_extensions import override

from torsh_distributed.errors import InvalidArgument

FAULTS_VARIABLE = "TORSH_FAULTS"
"""Faults of a run, separated by semicolons."""
LOG_VARIABLE = "TORSH_FAULT_LOG"
"""File in which faults and steps of all ranks are noted."""


class FaultKind(StrEnum):
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
    OUT_OF_MEMORY = "out_of_memory"
    """torch.OutOfMemoryError, as an allocator raises it."""
    DELAY = "delay"
    """Sleep for `seconds`: a slow rank, alive and answering."""
    SLOW = "slow"
    """Sleep for `seconds` in this step and every one after it."""
    LOCK_GIL = "lock_gil"
    """Hold the interpreter's lock for `seconds`: the process lives, but no Python thread runs."""
    LINK_DOWN = "link_down"
    """Take the network interface `target` down, up again after `seconds`. Needs the right to do so."""
    SLOW_LINK = "slow_link"
    """Limit the interface `target` to `rate_gbps`, for `seconds` if given. Needs the right to do so."""
    DISK_FULL = "disk_full"
    """No file of this process can grow beyond 4 KiB, for `seconds` if given."""
    FLIP_BYTE = "flip_byte"
    """Invert one byte in the file `target`, or in the newest checkpoint that this process has saved."""


_TIMED = {
    FaultKind.STOP,
    FaultKind.DELAY,
    FaultKind.SLOW,
    FaultKind.LOCK_GIL,
    FaultKind.LINK_DOWN,
    FaultKind.SLOW_LINK,
    FaultKind.DISK_FULL,
}
_NEEDS_SECONDS = {FaultKind.DELAY, FaultKind.SLOW, FaultKind.LOCK_GIL}
_NEEDS_TARGET = {FaultKind.LINK_DOWN, FaultKind.SLOW_LINK}
_FROM_A_THREAD = {FaultKind.KILL, FaultKind.STOP, FaultKind.SEGFAULT, FaultKind.LOCK_GIL}

_NUMBER = r"\d+(?:\.\d+)?"
_SHAPE = re.compile(
    rf"(?P<kind>{'|'.join(FaultKind)}) rank (?P<rank>\d+) at step (?P<step>\d+)"
    rf"(?: in (?P<point>[a-z_]+))?(?: after (?P<after>{_NUMBER}) s)?(?: of attempt (?P<attempt>\d+))?"
    rf"(?: on (?P<target>[^\s;]+))?(?: to (?P<rate>{_NUMBER}) gbps)?(?: for (?P<seconds>{_NUMBER}) s)?"
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: its kind, rank, step, and the point in the step.

    `attempt` counts the launcher's restarts from 0: a fault affects one attempt, so the next can succeed.
    """

    kind: FaultKind
    rank: int
    step: int
    point: str = ""
    """data, forward, backward, all_reduce, optimizer or save; empty is the start of the step. `regroup` is in a new
    world before its first step, `stream` in a worker that joins, while it gets the state. Loops may name others."""
    after_s: float | None = None
    """Seconds after the point, from a thread: to hit what takes a while in its middle."""
    attempt: int = 0
    target: str | None = None
    rate_gbps: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind in _NEEDS_SECONDS and self.seconds is None:
            raise InvalidArgument(f"say for how long: `{self} for 0.5 s`")
        if self.seconds is not None and self.kind not in _TIMED:
            raise InvalidArgument(f"a {self.kind} has no duration: {self}")
        if self.kind in _NEEDS_TARGET and self.target is None:
            raise InvalidArgument(f"say on which interface: `{self} on eth0`")
        if self.target is not None and self.kind not in _NEEDS_TARGET | {FaultKind.FLIP_BYTE}:
            raise InvalidArgument(f"a {self.kind} has no target: {self}")
        if (self.rate_gbps is not None) != (self.kind is FaultKind.SLOW_LINK):
            raise InvalidArgument(f"a rate belongs to a slow_link, and to it alone: {self}", hint="add `to 0.1 gbps`")
        if self.after_s is not None and self.kind not in _FROM_A_THREAD:
            raise InvalidArgument(
                f"only {', '.join(sorted(_FROM_A_THREAD))} can come after a point, from another thread: {self}"
            )

    @override
    def __str__(self) -> str:
        text = f"{self.kind} rank {self.rank} at step {self.step}"
        text += f" in {self.point}" if self.point else ""
        text += f" after {self.after_s:f} s" if self.after_s is not None else ""
        text += f" of attempt {self.attempt}" if self.attempt else ""
        text += f" on {self.target}" if self.target is not None else ""
        text += f" to {self.rate_gbps:f} gbps" if self.rate_gbps is not None else ""
        return text + (f" for {self.seconds:f} s" if self.seconds is not None else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The fault described by the text, as `str` prints it."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise InvalidArgument(
                f"not a fault: {text!r}",
                hint="write `kill rank 2 at step 5 [in POINT] [after X s] [of attempt N] [on TARGET] [for X s]`; kinds"
                f" are {', '.join(FaultKind)}",
            )
        return cls(
            kind=FaultKind(match["kind"]),
            rank=int(match["rank"]),
            step=int(match["step"]),
            point=match["point"] or "",
            after_s=_number(match["after"]),
            attempt=int(match["attempt"] or 0),
            target=match["target"],
            rate_gbps=_number(match["rate"]),
            seconds=_number(match["seconds"]),
        )


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults separated by semicolons."""
    return tuple(Fault.parse(part) for part in text.split(";") if part.strip())


def faults_environment(*faults: Fault | str) -> dict[str, str]:
    """The variable that passes faults to a launched script: `env={**os.environ, **faults_environment(…)}`."""
    text = "; ".join(map(str, faults))
    parse_faults(text)
    return {FAULTS_VARIABLE: text}


def faults_from_environment(environ: Mapping[str, str]) -> tuple[Fault, ...]:
    """The faults that this process was started with, if any."""
    return parse_faults(environ.get(FAULTS_VARIABLE, ""))


def random_faults(
    seed: int,
    *,
    num_faults: int,
    num_ranks: int,
    num_steps: int,
    kinds: Sequence[FaultKind] = (FaultKind.KILL, FaultKind.STOP),
    points: Sequence[str] = ("",),
    seconds: float = 1.0,
) -> tuple[Fault, ...]:
    """Faults at random ranks, steps and points, the same for the same seed; at most one per rank and step.

    `seconds` is how long those last that need a duration.
    """
    source = random.Random(seed)
    places = range(num_ranks * num_steps)
    if num_faults > len(places):
        raise InvalidArgument(
            "there are more faults than ranks have steps", faults=num_faults, ranks=num_ranks, steps=num_steps
        )
    found = []
    for rank, step in sorted(divmod(place, num_steps) for place in source.sample(places, num_faults)):
        kind = source.choice(kinds)
        lasts_s = seconds if kind in _NEEDS_SECONDS else None
        found.append(Fault(kind=kind, rank=rank, step=step, point=source.choice(points), seconds=lasts_s))
    return tuple(found)
