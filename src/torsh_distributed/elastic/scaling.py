"""How many workers a job should have, from its load: policies, and the thread that asks one of them now and then.

Rank 0 looks, decides and tells the launcher, which starts workers or lets the last ranks leave between two steps. The
policy is on every rank, so the next rank 0 goes on when this one is lost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from torsh_distributed.errors import InvalidArgument

if TYPE_CHECKING:
    from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

PolicyName = Literal["aggressive", "conservative"]


@runtime_checkable
class ScalableJob(Protocol):
    """What a worker knows of its job and can ask for."""

    busy_s: float
    """Time that this rank has spent in steps."""

    @property
    def is_leading(self) -> bool:
        """Whether this worker is rank 0 of the present world."""

    @property
    def num_workers(self) -> int:
        """Members of the present world."""

    @property
    def num_steps(self) -> int:
        """Updates done."""

    def ask_for(self, num_workers: int, reason: str) -> None:
        """Ask the launcher for that many workers, within the job's limits."""


@dataclass(frozen=True, kw_only=True)
class JobLoad:
    """What a policy is told, by rank 0."""

    num_workers: int
    """In the world now."""
    load: float
    """How much of what these workers can do is asked of them; more workers make it smaller.

    Unless the user's own number: the share of the time since the last look that rank 0 spent in steps. The rest it
    waited for data.
    """
    num_steps: int
    """Updates done so far."""


WantedWorkers = Callable[[JobLoad], int | None]
"""A policy: the number of workers wanted now, or None to leave it as it is. The launcher keeps to the job's limits."""


class LoadPolicy:
    """More workers above one load, fewer below another."""

    def __init__(self, *, up: float, down: float, num_looks: int, jumps: bool) -> None:
        """Acts after `num_looks` looks in a row; `jumps` to the number that brings the load to the middle between `up`
        and `down`, or goes one worker at a time."""
        self._up = up
        self._down = down
        self._num_looks = num_looks
        self._jumps = jumps
        self._above = 0
        self._below = 0

    def __call__(self, job: JobLoad) -> int | None:
        """How many workers are wanted, once the load has been high or low for long enough."""
        self._above = self._above + 1 if job.load > self._up else 0
        self._below = self._below + 1 if job.load < self._down else 0
        if max(self._above, self._below) < self._num_looks:
            return None
        is_above = self._above > 0
        self._above = self._below = 0
        one = 1 if is_above else -1
        if not self._jumps:
            return max(1, job.num_workers + one)
        fitting = math.ceil(job.num_workers * job.load / ((self._up + self._down) / 2))
        return max(1, fitting, job.num_workers + 1) if is_above else max(1, min(fitting, job.num_workers - 1))


def policy_named(name: str) -> LoadPolicy:
    """`aggressive` acts on one look above 0.8 or below 0.3, `conservative` on three above 0.9 or below 0.2."""
    if name == "aggressive":
        return LoadPolicy(up=0.8, down=0.3, num_looks=1, jumps=True)
    if name == "conservative":
        return LoadPolicy(up=0.9, down=0.2, num_looks=3, jumps=False)
    raise InvalidArgument(
        f"there is no scaling policy {name!r}", hint="use aggressive, conservative, or a function of your own"
    )


class JobScaler:
    """Asks a policy on rank 0, and tells the launcher if it wants another number of workers."""

    def __init__(self, job: ScalableJob, wanted: WantedWorkers, *, load: Callable[[], float] | None = None) -> None:
        self._job = job
        self._wanted = wanted
        self._load = load
        self._last_look = (time.monotonic(), job.busy_s)

    def start(self, *, every_s: float) -> None:
        """Look that often, on a thread that ends with the process."""
        threading.Thread(target=self._run, args=(every_s,), name="torsh-scaling", daemon=True).start()

    def _run(self, every_s: float) -> None:
        pause = threading.Event()
        while not pause.wait(every_s):
            try:
                self.look()
            except Exception:  # the user's function must not end training
                _log.warning("the scaling policy failed; the job keeps its workers", exc_info=True)

    def look(self) -> int | None:
        """Look once; the number of workers that was asked for, if any was."""
        job = self._job
        before_s, busy_before_s = self._last_look
        self._last_look = now_s, busy_s = time.monotonic(), job.busy_s
        if not job.is_leading:
            return None
        load = self._load() if self._load is not None else (busy_s - busy_before_s) / max(1e-9, now_s - before_s)
        wanted = self._wanted(JobLoad(num_workers=job.num_workers, load=load, num_steps=job.num_steps))
        if wanted is None:
            return None
        job.ask_for(int(wanted), f"load {load:.2f} with {job.num_workers}")
        return int(wanted)


def scale_by(
    engine: Engine,
    wanted: WantedWorkers | PolicyName,
    *,
    load: Callable[[], float] | None = None,
    every_s: float = 30.0,
) -> None:
    """Let `wanted` decide how many workers the job has; every rank calls this, before its first step.

    `wanted` is a function of `JobLoad`, or the name of a policy: `aggressive` acts at once and jumps to the number that
    fits, `conservative` waits for three looks and goes one worker at a time. `load` replaces the measured load: the
    length of a queue over what the workers can take, for instance. Both are called on a thread of rank 0. Workers that
    leave finish their step. Without `torsh run --elastic`, or in a plan that cannot go on in place, nothing scales.
    """
    if every_s <= 0:
        raise InvalidArgument("every_s must be a positive number of seconds", every_s=every_s)
    chosen = policy_named(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(engine.elastic, ScalableJob):
        _log.warning("scale_by: this job cannot change its workers while it runs; it keeps those it has")
        return
    JobScaler(engine.elastic, chosen, load=load).start(every_s=every_s)
