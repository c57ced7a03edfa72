"""When a checkpoint is saved: at chosen steps, after a time, on a better metric, at a request or a preemption.

Steps and metrics are equal on all ranks, so they need no agreement. Clocks, signals, requests and saves that failed in
the background are not: about once a second the ranks tell each other, in one small all-reduce, at steps that all of
them know beforehand.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torsh_distributed.checkpoint.files.checkpoint_directory import REQUEST
from torsh_distributed.comm.collectives.reductions import all_reduce

EXIT_CODE = 75
"""EX_TEMPFAIL: the job was told to stop, has saved, and may be started again."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class PreemptionSignals:
    """Notes SIGTERM, SIGUSR1 and SIGINT while it is watching; the handlers from before are put back after.

    A second SIGINT goes to the handler from before: it ends a process that reaches no further step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def watch(self) -> bool:
        """Start noting; False where Python allows no handlers, outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return True

    def stop(self) -> None:
        """Put the handlers from before back."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @property
    def exit_code(self) -> int:
        """What to exit with once saved: as after Ctrl-C for SIGINT, else the code that asks to be started again."""
        return 128 + signal.SIGINT if self.received == signal.SIGINT else EXIT_CODE

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(signal.Signals(number))
        if number == signal.SIGINT and self.received == signal.SIGINT and callable(before):
            before(number, frame)
        self.received = signal.Signals(number)


FAILURE = "failure"
"""The reason of a decision not to save: the save before has failed."""
_CHECK_S = 1.0


class SaveDecision(NamedTuple):
    """Why to save now, and whether to end the job after it."""

    reason: str
    is_last: bool = False


class SaveTriggers:
    """Decides after each step, the same on every rank; every rank calls `after_step` for every step."""

    def __init__(
        self,
        directory: Path,
        *,
        every_steps: int | None,
        every_s: float | None = None,
        signals: PreemptionSignals | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._directory = directory
        self._every_steps, self._every_s = every_steps, every_s
        self._signals = signals
        self._device = device or torch.device("cpu")
        self._best = math.inf
        self._is_asked = False
        self._saved_at = self._checked_at = time.monotonic()
        self._checked_step = 0
        self._next_check: int | None = None

    @property
    def best(self) -> float | None:
        """The lowest metric so far."""
        return None if math.isinf(self._best) else self._best

    def resumed(self, best: float | None) -> None:
        """Continue after a load, with the lowest metric so far."""
        self._best = math.inf if best is None else best
        self._next_check = None

    def is_best(self, metric: float) -> bool:
        """Whether a metric, equal on all ranks, is lower than all before it; it counts from now on."""
        if not metric < self._best:
            return False
        self._best = metric
        return True

    def ask(self) -> None:
        """Save at the next exchange of the ranks; any rank may call this, from any thread."""
        self._is_asked = True

    def use_intervals(self, *, every_steps: int | None, every_s: float | None) -> None:
        """Save at other intervals from now on; every rank calls this after the same step."""
        self._every_steps, self._every_s = every_steps, every_s

    def saved(self) -> None:
        """A checkpoint was saved: the clock starts again."""
        self._saved_at = time.monotonic()

    def after_step(self, step: int, *, has_failed: bool = False) -> SaveDecision | None:
        """Whether to save now, on every rank alike. Not at step 0.

        `has_failed`: this rank knows that the last save failed; once any does, all are told so instead.
        """
        asked = self._agreed(step, has_failed=has_failed)
        if asked is None and self._every_steps is not None and step % self._every_steps == 0:
            return SaveDecision("steps")
        return asked

    def _agreed(self, step: int, *, has_failed: bool) -> SaveDecision | None:
        """What any rank was told, or rank 0's clock says, since the last exchange."""
        if self._next_check is not None and step < self._next_check:
            return None
        now = time.monotonic()
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        is_first = is_alone or dist.get_rank() == 0
        spent_s, steps = now - self._checked_at, step - self._checked_step
        distance = max(1, int(steps * _CHECK_S / spent_s)) if self._next_check is not None and spent_s > 0 else 1
        is_told = self._signals is not None and self._signals.received is not None
        is_late = is_first and self._every_s is not None and now - self._saved_at >= self._every_s
        is_asked = self._is_asked or (is_first and self._take_request())
        self._is_asked = False
        ahead = min(distance, 10 * max(1, steps)) if is_first else 0
        flags = [int(is_told), int(has_failed), int(is_late), int(is_asked), ahead]
        if not is_alone:
            told = torch.tensor(flags, device=self._device)
            all_reduce(told, "max")
            flags = told.tolist()
        self._checked_at, self._checked_step, self._next_check = now, step, step + max(1, flags[4])
        if flags[0]:
            return SaveDecision("signal", is_last=True)
        for is_so, reason in zip(flags[1:4], (FAILURE, "time", "request"), strict=True):
            if is_so:
                return SaveDecision(reason)
        return None

    def _take_request(self) -> bool:
        """Whether `torsh checkpoint now` has asked; the request is taken."""
        try:
            (self._directory / REQUEST).unlink()
        except OSError:
            return False
        return True
