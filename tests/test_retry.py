"""Retries: only retryable errors, within a deadline, with delays that differ between processes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.errors import InvalidArgument, IoError, OperationTimeout
from torsh_distributed.plan.sections.recovery import RetryConfig
from torsh_distributed.retry import delay_s, retry, with_timeout

QUICK = RetryConfig(max_retries=3, initial_delay_s=0.001, max_delay_s=0.002)


class Flaky:
    """Fails a number of times, then answers."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures = failures
        self.error = error
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "done"


def test_a_temporary_failure_is_retried() -> None:
    flaky = Flaky(2, IoError("busy"))
    assert retry(QUICK)(flaky.__call__)() == "done"
    assert flaky.calls == 3


def test_the_last_error_is_raised_with_the_number_of_attempts() -> None:
    flaky = Flaky(99, IoError("busy"))
    with pytest.raises(IoError, match="busy") as caught:
        retry(QUICK)(flaky.__call__)()
    assert flaky.calls == 4
    assert "gave up after 4 attempts" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), KeyError("foreign")])
def test_what_is_not_retryable_is_tried_once(error: Exception) -> None:
    flaky = Flaky(99, error)
    with pytest.raises(type(error)):
        retry(QUICK)(flaky.__call__)()
    assert flaky.calls == 1


def test_zero_retries_mean_one_attempt() -> None:
    flaky = Flaky(99, IoError("busy"))
    with pytest.raises(IoError):
        retry(QUICK.replace(max_retries=0))(flaky.__call__)()
    assert flaky.calls == 1


def test_no_wait_goes_beyond_the_total_deadline() -> None:
    flaky = Flaky(99, IoError("busy"))
    with pytest.raises(IoError):
        retry(RetryConfig(max_retries=50, initial_delay_s=60.0, max_delay_s=60.0, total_timeout_s=0.5))(
            flaky.__call__
        )()
    assert flaky.calls == 1, "the first wait would already pass the deadline"


@given(
    attempt=st.integers(1, 40),
    initial=st.floats(0, 5),
    multiplier=st.floats(1, 4),
    ceiling=st.floats(0, 20),
    jitter=st.floats(0, 1),
    exponential=st.booleans(),
)
def test_a_delay_stays_within_its_jitter_and_ceiling(
    attempt: int, initial: float, multiplier: float, ceiling: float, jitter: float, exponential: bool
) -> None:
    policy = RetryConfig(
        initial_delay_s=initial, multiplier=multiplier, max_delay_s=ceiling, jitter=jitter, exponential=exponential
    )
    base = min(initial * multiplier ** (attempt - 1) if exponential else initial, ceiling)
    assert base * (1 - jitter) - 1e-9 <= delay_s(policy, attempt) <= base * (1 + jitter) + 1e-9


def test_jitter_really_varies() -> None:
    assert len({delay_s(RetryConfig(), 1) for _ in range(20)}) > 1


def test_a_coroutine_is_retried_too() -> None:
    flaky = Flaky(2, IoError("busy"))

    @retry(QUICK)
    async def ask(word: str) -> str:
        await asyncio.sleep(0)
        return f"{word} {flaky()}"

    assert asyncio.run(ask("now")) == "now done"
    flaky.calls, flaky.failures = 0, 99
    with pytest.raises(IoError, match="busy") as caught:
        asyncio.run(ask("now"))
    assert flaky.calls == 4
    assert "gave up after 4 attempts" in caught.value.__notes__[0]


def test_a_coroutine_that_does_not_end_is_cancelled_and_named() -> None:
    ended = []

    @with_timeout(0.02)
    async def wait_for_nobody() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    with pytest.raises(OperationTimeout, match=r"wait_for_nobody did not end within 0\.02 s"):
        asyncio.run(wait_for_nobody())
    assert ended == ["cancelled"]


def test_a_timeout_of_the_functions_own_stays_its_own() -> None:
    @with_timeout(60)
    async def gives_up() -> str:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match=r"^mine$"):
        asyncio.run(gives_up())


def test_a_function_that_blocks_cannot_have_a_timeout_from_outside() -> None:
    with pytest.raises(InvalidArgument, match="is for coroutine functions"):
        with_timeout(1.0)(lambda: None)  # type: ignore[arg-type,return-value]  # what is refused
    with pytest.raises(InvalidArgument, match="above 0 seconds"):
        with_timeout(0.0)
