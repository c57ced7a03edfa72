"""Training goes on while checkpoints cannot be written: every failure is told, and the save is tried again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torsh_distributed import events
from torsh_distributed.plan import RetryConfig
from torsh_distributed.retry import delay_s
from torsh_distributed.train.recovery.open_incidents import OpenIncidents

_log = logging.getLogger(__name__)
_STORAGE = "storage"


class DeferredSaves:
    """Notes on one rank which periodic saves failed, and when the next may be tried.

    A save ends in the background, on all ranks alike but not at one moment. So nothing is decided here: `ask` makes all
    ranks save at their next exchange, and any rank may ask.
    """

    def __init__(self, policy: RetryConfig, ask: Callable[[], None]) -> None:
        self._policy = policy
        self._ask = ask
        self._incidents = OpenIncidents()
        self._num_failures = 0
        self._retry_at: float | None = None
        self._forget = events.subscribe(self._note, events.CheckpointEvent)

    def after_step(self, step: int) -> None:
        """Ask for the save again once its delay is over; called after every step."""
        self._incidents.step_done(step)
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._retry_at = None
            self._ask()

    def failed(self, step: int, reason: str) -> None:
        """A save could not be made; training goes on without it."""
        self._num_failures += 1
        wait_s = delay_s(self._policy, min(self._num_failures, 64))
        self._retry_at = time.monotonic() + wait_s
        message = f"no checkpoint of step {step}: {reason}; training goes on, {self._num_failures} in a row failed"
        self._incidents.open(_STORAGE, "go on without checkpoints, try again", step=step, detail=reason)
        _log.error("%s; next attempt in %.1f s", message, wait_s)
        events.emit(events.AlertEvent(severity="error", name="checkpoint failed", message=message))

    def close(self) -> None:
        """Note no more."""
        self._forget()

    def _note(self, event: events.Event) -> None:
        """On the writer's thread: how a save ended."""
        assert isinstance(event, events.CheckpointEvent)
        if event.action != "saved":
            return
        if event.error is not None:
            self.failed(event.step, event.error)
            return
        self._num_failures, self._retry_at = 0, None
        self._incidents.acted(_STORAGE)
