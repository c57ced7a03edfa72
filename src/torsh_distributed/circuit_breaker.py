"""A break after many failures: while a service is down, calls fail at once instead of waiting each for its timeout."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from torsh_distributed import events
from torsh_distributed.errors import IoError
from torsh_distributed.plan.sections.recovery import RetryConfig

R = TypeVar("R")


class CircuitState(StrEnum):
    """Whether calls are made."""

    CLOSED = "closed"
    """All are."""
    OPEN = "open"
    """None are, until the break is over."""
    HALF_OPEN = "half_open"
    """One at a time: successes close the circuit, a failure opens it again."""


class CircuitOpen(IoError):
    """A call was not made, because many before it failed. Not retryable: the break lasts longer than a delay."""

    retryable = False


class CircuitBreaker:
    """Counts the failures of a service, and makes no calls for a while after too many. Used by any thread.

    Only `failures` count, which are the errors of the service; others pass without a trace.
    """

    def __init__(
        self,
        name: str,
        policy: RetryConfig | None = None,
        *,
        failures: tuple[type[Exception], ...] = (OSError,),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._policy = policy or RetryConfig()
        self._kinds = failures
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: deque[float] = deque()
        self._opened_at: float | None = None
        self._num_successes = 0
        self._is_trying = False

    @property
    def state(self) -> CircuitState:
        """What happens to the next call."""
        with self._lock:
            return self._state()

    def call(self, function: Callable[[], R]) -> R:
        """The function's result; CircuitOpen without calling it during a break."""
        self.require_closed()
        try:
            result = function()
        except self._kinds as error:
            self.failed(error)
            raise
        except BaseException:
            self._leave()
            raise
        self.succeeded()
        return result

    def _state(self) -> CircuitState:
        if self._opened_at is None:
            return CircuitState.CLOSED
        is_over = self._clock() - self._opened_at >= self._policy.break_s
        return CircuitState.HALF_OPEN if is_over else CircuitState.OPEN

    def require_closed(self) -> None:
        """Raise CircuitOpen during a break; after it, let one caller through. `failed` or `succeeded` has to follow."""
        with self._lock:
            state = self._state()
            if state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and not self._is_trying):
                self._is_trying = state is CircuitState.HALF_OPEN
                return
            assert self._opened_at is not None, "only an open circuit gets here"
            left_s = max(0.0, self._opened_at + self._policy.break_s - self._clock())
        raise CircuitOpen(
            f"{self.name} was not tried: it failed {self._policy.failure_threshold} times within"
            f" {self._policy.failure_window_s:g} s; the next attempt is in {left_s:.1f} s",
            hint="look at the first failures; retry.break_s says how long a break lasts",
        )

    def _leave(self) -> None:
        with self._lock:
            self._is_trying = False

    def failed(self, error: Exception) -> None:
        """A call to the service failed."""
        with self._lock:
            now = self._clock()
            was_half_open = self._is_trying
            self._is_trying, self._num_successes = False, 0
            self._failures.append(now)
            while self._failures and now - self._failures[0] > self._policy.failure_window_s:
                self._failures.popleft()
            if not was_half_open and len(self._failures) < self._policy.failure_threshold:
                return
            is_news = self._opened_at is None
            self._opened_at = now
        if is_news:
            message = f"{self.name} is not tried for {self._policy.break_s:g} s after many failures: {error}"
            events.emit(events.AlertEvent(severity="warning", name="circuit open", message=message))

    def succeeded(self) -> None:
        """The service has answered."""
        with self._lock:
            self._is_trying = False
            if self._opened_at is None:
                return
            self._num_successes += 1
            if self._num_successes >= self._policy.success_threshold:
                self._opened_at, self._num_successes = None, 0
                self._failures.clear()
