"""Retries with backoff and a deadline, for stores, sockets and files.

Only errors of a `retryable` type are retried. A collective must not be retried on one rank alone: the others have
moved on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, cast

import tenacity

from torsh_distributed.errors import InvalidArgument, OperationTimeout, TorshError
from torsh_distributed.plan.sections.recovery import RetryConfig

P = ParamSpec("P")
R = TypeVar("R")

# Never seeded: with a shared seed all ranks would wait equally long and collide again.
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
    """Decorate a function, or a coroutine function, to retry under `policy`.

    The last error is raised unchanged, with a note of how many attempts were made.
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
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def await_result(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await tenacity.AsyncRetrying(**options)(function, *args, **kwargs)

            return cast(Callable[P, R], await_result)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # A tenacity controller keeps per-call state, so each call gets its own.
            return tenacity.Retrying(**options)(function, *args, **kwargs)

        return call

    return decorate


def with_timeout(seconds: float) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate a coroutine function: a call that takes longer is cancelled and raises OperationTimeout, with its name.

    Not for a function that blocks: nothing outside can end it, so every blocking call of this library has a timeout of
    its own. Under `retry` each attempt gets the whole time.
    """
    if not seconds > 0:
        raise InvalidArgument("a timeout is above 0 seconds", timeout_s=seconds)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        if not inspect.iscoroutinefunction(function):
            raise InvalidArgument(
                f"with_timeout is for coroutine functions, and {function.__qualname__} blocks",
                hint="give the call inside it a timeout, or make it a coroutine",
            )

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    found: R = await function(*args, **kwargs)
                    return found
            except TimeoutError as error:
                if not limit.expired() or isinstance(error, TorshError):
                    raise  # of the function's own making
                raise OperationTimeout(
                    f"{function.__qualname__} did not end within {seconds:g} s", operation=function.__qualname__
                ) from error

        return call

    return decorate
