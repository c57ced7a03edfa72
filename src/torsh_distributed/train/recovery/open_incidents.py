"""Incidents that this process acts on: opened when a failure is noticed, resolved by a step that completes after."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from torsh_distributed import events
from torsh_distributed.plan import RetryConfig
from torsh_distributed.retry import delay_s

_log = logging.getLogger(__name__)


@dataclass
class _OpenIncident:
    name: str
    failure: str
    action: str
    started_s: float
    is_acted_on: bool = False


class OpenIncidents:
    """The incidents of one process, one of each kind at a time; each is an event when it opens and when it ends."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenIncident] = {}

    def is_open(self, failure: str) -> bool:
        """Whether a failure of this kind is being handled."""
        return failure in self._open

    def open(self, failure: str, action: str, *, step: int, detail: str) -> None:
        """A failure was noticed, and `action` is what is done about it. One that is open already stays the same."""
        if failure in self._open:
            return
        self._open[failure] = _OpenIncident(secrets.token_hex(6), failure, action, time.monotonic())
        _log.warning("%s at step %d: %s; %s", failure.replace("_", " "), step, detail, action)
        self._emit(failure, "open", step=step, detail=detail)

    def acted(self, failure: str) -> None:
        """The action is done; whether it helped, the next step shows."""
        if failure in self._open:
            self._open[failure].is_acted_on = True

    def step_done(self, step: int) -> None:
        """A step was completed: what was acted on before it is resolved."""
        for failure in [name for name, one in self._open.items() if one.is_acted_on]:
            self._emit(failure, "resolved", step=step)
            one = self._open.pop(failure)
            _log.warning("%s resolved at step %d: %s", failure.replace("_", " "), step, one.action)

    def failed(self, failure: str, *, step: int, detail: str) -> None:
        """The action did not help; the caller raises."""
        if failure in self._open:
            self._emit(failure, "failed", step=step, detail=detail)
            del self._open[failure]

    def _emit(self, failure: str, status: events.IncidentStatus, *, step: int, detail: str | None = None) -> None:
        one = self._open[failure]
        events.emit(
            events.IncidentEvent(
                incident=one.name,
                failure=failure,
                status=status,
                action=one.action,
                step=step,
                detail=detail,
                duration_s=None if status == "open" else time.monotonic() - one.started_s,
            )
        )


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
        """Stop taking notes."""
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
