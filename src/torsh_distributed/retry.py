"""Try again, with backoff and a deadline; stop trying where it is hopeless.

Only errors that call themselves `retryable` are tried again: the decision is by type. A collective must not
be retried on one rank alone (the others have moved on); this is for stores, sockets and files.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import tenacity

from torsh_distributed.errors import CommunicationError, TorshError
from torsh_distributed.plan.sections.retry import RetryConfig

P = ParamSpec("P")
R = TypeVar("R")

# Per process, never seeded: with a shared seed all ranks would back off in step and collide again.
_jitter = random.SystemRandom()


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, TorshError) and error.retryable


def delay_s(policy: RetryConfig, attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1), jitter included."""
    growth = policy.multiplier ** (attempt - 1) if policy.exponential else 1.0
    base = min(policy.initial_delay_s * growth, policy.max_delay_s)
    return max(0.0, base * (1 + _jitter.uniform(-policy.jitter, policy.jitter)))


def _note_attempts(state: tenacity.RetryCallState) -> Any:
    outcome = cast(tenacity.Future, state.outcome)
    error = outcome.exception()
    if error is not None and state.attempt_number > 1:
        error.add_note(f"gave up after {state.attempt_number} attempts in {state.seconds_since_start or 0:.2f} s")
    return outcome.result()


def retry(policy: RetryConfig | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, sync or async, to be tried again under `policy`.

    The last error is raised as it is, with a note of how many attempts were made.
    """
    chosen = policy or RetryConfig()
    options: dict[str, Any] = {
        "retry": tenacity.retry_if_exception(_is_retryable),
        "wait": lambda state: delay_s(chosen, state.attempt_number),
        "stop": tenacity.stop_any(
            tenacity.stop_after_attempt(chosen.max_retries + 1), tenacity.stop_before_delay(chosen.total_timeout_s)
        ),
        "retry_error_callback": _note_attempts,
    }

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # A tenacity controller keeps per-call state, so each call gets its own.
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await tenacity.AsyncRetrying(**options)(function, *args, **kwargs)

            return cast(Callable[P, R], call_async)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return tenacity.Retrying(**options)(function, *args, **kwargs)

        return call

    return decorate


class CircuitBreaker:
    """Fail at once while a service is down, instead of waiting for it on every call.

    After `max_failures` failures in a row calls are refused for `reset_s` seconds; then one is let through.
    Errors of the caller's making (not retryable) do not count.
    """

    def __init__(self, name: str, *, max_failures: int = 5, reset_s: float = 30.0) -> None:
        # Here and not above: pybreaker imports the Redis client wherever one is installed.
        import pybreaker

        self.name = name
        self._refusal: type[Exception] = pybreaker.CircuitBreakerError
        self._breaker = pybreaker.CircuitBreaker(
            fail_max=max_failures,
            reset_timeout=reset_s,
            exclude=[lambda error: not _is_retryable(error)],
            throw_new_error_on_trip=False,
            name=name,
        )

    @property
    def state(self) -> str:
        """closed (calls pass), open (calls are refused) or half-open (one call may try)."""
        return str(self._breaker.current_state)

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function`, or raise CommunicationError at once while the circuit is open."""
        try:
            return self._breaker.call(function, *args, **kwargs)
        except self._refusal as error:
            raise CommunicationError(
                f"{self.name} is not called: it failed {self._breaker.fail_max} times in a row",
                hint=f"bring {self.name} back; the next call is let through after {self._breaker.reset_timeout} s",
                operation=self.name,
            ) from error
