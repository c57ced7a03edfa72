"""How a worker is, from its beats and its state in /proc: healthy, degraded, critical or failed, with the reason.

A worker's line beats ten times a second from a thread that needs Python's lock. Beats that stop tell little by
themselves; the kernel tells the rest: a stopped process (SIGSTOP), one whose native code holds the lock, one that waits
for a disk. A long step is none of these: it beats.

Workers whose script has come to its end but whose process has not: who they are, where they hang, and their end.
Python waits for threads that are not daemons and for `atexit` handlers, without a limit. A job would wait for ever for
a rank whose work is done, so it is told about after a while and ended after a longer one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.local.worker_variables import BEAT_S, SLOW_BEAT_S
from torsh_distributed.launch.worker.rank_status import RankStatus

_NOTICE_S = 10.0
_ANSWER_S = 1.0


class LeavingWatch:
    """Watches the workers of one attempt on a node, from the status with which their script ends.

    `ask` makes every worker say what it does; `end` is called with a rank and the reason after `limit_s`.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        limit_s: float,
        ask: Callable[[], None],
        warn: Callable[[str], None],
        end: Callable[[int, str], None],
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._notice_s = min(_NOTICE_S, limit_s / 2)
        self._ask, self._warn, self._end = ask, warn, end
        self._leaving: dict[int, RankStatus] = {}
        self._untold: set[int] = set()
        self._timers: list[Timer] = []

    def note(self, status: RankStatus) -> None:
        """A worker says that its script has ended, or where it is since."""
        rank = status.rank
        if status.has_finished and rank not in self._leaving:
            self._leaving[rank] = status
            self._timers.append(self._loop.call_later(self._notice_s, partial(self._question, rank)))
            self._timers.append(self._loop.call_later(self._limit_s, partial(self._give_up, rank)))
        elif rank in self._leaving and not status.has_finished:
            self._leaving[rank] = status
            self._tell(rank)

    def forget(self, rank: int | None) -> None:
        """The worker has ended."""
        if rank is not None:
            self._leaving.pop(rank, None)
            self._untold.discard(rank)

    def close(self) -> None:
        """Stop watching."""
        for timer in self._timers:
            timer.cancel()
        self._leaving = {}

    def _question(self, rank: int) -> None:
        if rank in self._leaving:
            self._untold.add(rank)
            self._timers.append(self._loop.call_later(_ANSWER_S, partial(self._tell, rank)))
            self._ask()

    def _tell(self, rank: int) -> None:
        if rank not in self._untold or rank not in self._leaving:
            return
        self._untold.discard(rank)
        status = self._leaving[rank]
        left_s = self._limit_s - self._notice_s
        head = f"rank {rank} has come to the end of its script, but its process does not end: {status.whereabouts}"
        lines = [f"{head}; it is ended in {left_s:g} s (--exit-timeout)", *(f"  {line}" for line in status.stack)]
        self._warn("\n".join(lines))

    def _give_up(self, rank: int) -> None:
        status = self._leaving.get(rank)
        if status is not None:
            self._end(rank, f"its script ended, its process did not within {self._limit_s:g} s: {status.whereabouts}")


_LATE_BEATS = 3
_TICK_S = 0.1


class HealthState(StrEnum):
    """From best to worst; `recovering` is a member that is entering another world."""

    HEALTHY = "healthy"
    RECOVERING = "recovering"
    DEGRADED = "degraded"
    CRITICAL = "critical"
    FAILED = "failed"


@dataclass(frozen=True)
class Health:
    """A state and why."""

    state: HealthState
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class HealthLimits:
    """How long a silence may last before a worker is given up, by its cause."""

    stopped_s: float = 0.4
    silent_s: float = 10.0
    beat_s: float = BEAT_S
    """Seconds between beats."""


NOTICED = HealthLimits(stopped_s=math.inf, silent_s=20.0, beat_s=SLOW_BEAT_S)
"""Where nobody is replaced a silent worker is only told about: at once if it is stopped, else after ten seconds."""


def judge(silent_s: float, process_state: str, is_busy: bool, limits: HealthLimits) -> Health:
    """How a worker is that has been silent for `silent_s`; its state is the kernel's letter, `is_busy` uses the CPU."""
    if silent_s < _LATE_BEATS * limits.beat_s:
        return Health(HealthState.HEALTHY)
    if process_state == "T":
        state = HealthState.FAILED if silent_s >= limits.stopped_s else HealthState.CRITICAL
        return Health(state, f"stopped (SIGSTOP) for {silent_s:.1f} s")
    if process_state == "t":
        return Health(HealthState.DEGRADED, "stopped by a debugger")
    if process_state == "D":
        why = "waits for a disk or network file system that does not answer"
    elif is_busy:
        why = "computes in native code that holds Python's lock"
    else:
        why = "waits in native code that holds Python's lock"
    if silent_s >= limits.silent_s:
        return Health(HealthState.FAILED, f"silent for {silent_s:.1f} s: it {why}")
    return Health(HealthState.CRITICAL if silent_s >= limits.silent_s / 2 else HealthState.DEGRADED, f"it {why}")


@dataclass
class _Watched:
    pid: int
    beat_s: float
    cpu_ticks: int = 0
    health: Health = field(default_factory=lambda: Health(HealthState.HEALTHY))


class HealthWatch:
    """Watches the workers of a node that beat; `on_change` is called with each change of state.

    A late tick means that this process was suspended. Beats that were sent meanwhile are still unread, so that tick
    counts for nobody.
    """

    def __init__(self, loop: Loop, limits: HealthLimits, on_change: Callable[[int, Health], None]) -> None:
        self._loop = loop
        self._limits = limits
        self._on_change = on_change
        self._watched: dict[int, _Watched] = {}
        self._last_tick_s = time.monotonic()
        self._is_closed = False
        self._tick_s = max(_TICK_S, limits.beat_s)
        loop.call_later(self._tick_s, self._tick)

    def watch(self, member: int, pid: int) -> None:
        """Watch a worker from now on: once it trains. Before, imports and loading may hold Python's lock for long."""
        self._watched[member] = _Watched(pid, time.monotonic())

    def beat(self, member: int) -> None:
        """A worker gave a sign of life."""
        watched = self._watched.get(member)
        if watched is not None:
            watched.beat_s = time.monotonic()

    def forget(self, member: int) -> None:
        """The worker is gone."""
        self._watched.pop(member, None)

    def health(self, member: int) -> Health:
        """How the worker was at the last tick."""
        watched = self._watched.get(member)
        return Health(HealthState.FAILED, "it has ended") if watched is None else watched.health

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True

    def _tick(self) -> None:
        if self._is_closed:
            return
        now_s = time.monotonic()
        was_suspended = now_s - self._last_tick_s > 2 * self._tick_s + self._limits.beat_s
        self._last_tick_s = now_s
        self._loop.call_later(self._tick_s, self._tick)
        for member, watched in list(self._watched.items()):
            if was_suspended:
                watched.beat_s = max(watched.beat_s, now_s - self._limits.beat_s)
                continue
            silent_s = now_s - watched.beat_s
            if silent_s < _LATE_BEATS * self._limits.beat_s:
                found = Health(HealthState.HEALTHY)
            else:
                process_state, ticks = _look_at(watched.pid)
                if process_state in ("Z", "X", ""):  # its exit is reported by itself
                    del self._watched[member]
                    continue
                found = judge(silent_s, process_state, ticks > watched.cpu_ticks, self._limits)
                watched.cpu_ticks = ticks
            if found.state is not watched.health.state:
                watched.health = found
                self._on_change(member, found)


def _look_at(pid: int) -> tuple[str, int]:
    """The kernel's letter for the state of a process ("" if it is gone), and its CPU time in clock ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        state = fields[0].decode()
        if state in "RS" and any(_thread_states(pid, "T")):
            state = "T"
        return state, int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return "", 0


def _thread_states(pid: int, wanted: str) -> list[str]:
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        letter = Path(f"/proc/{pid}/task/{thread}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
        if letter == wanted:
            found.append(thread)
    return found
