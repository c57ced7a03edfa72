"""The circuit breaker: closed, open after failures within the window, closed again after successes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed import events
from torsh_distributed.circuit_breaker import CircuitBreaker, CircuitOpen, CircuitState
from torsh_distributed.plan import RetryConfig

POLICY = RetryConfig(failure_threshold=3, failure_window_s=10, break_s=5, success_threshold=2)


class Service:
    """Fails while it is down; counts what reaches it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_down = False
        self.calls = 0
        self.breaker = CircuitBreaker("s3://bucket", POLICY, clock=lambda: self.now)

    def answer(self) -> str:
        self.calls += 1
        if self.is_down:
            raise OSError("down")
        return "here"

    def ask(self) -> str | None:
        try:
            return self.breaker.call(self.answer)
        except CircuitOpen:
            return "not tried"
        except OSError:
            return None


def test_failures_open_it_and_successes_close_it() -> None:
    service = Service()
    service.is_down = True
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.AlertEvent)
    try:
        assert [service.ask() for _ in range(5)] == [None, None, None, "not tried", "not tried"]
    finally:
        end()
    assert len(seen) == 1
    assert service.calls == 3
    service.now += 5
    assert service.breaker.state is CircuitState.HALF_OPEN
    assert [service.ask(), service.ask()] == [None, "not tried"]  # one attempt, and it failed
    service.now += 5
    service.is_down = False
    assert [service.ask(), service.breaker.state] == ["here", CircuitState.HALF_OPEN]
    assert [service.ask(), service.breaker.state] == ["here", CircuitState.CLOSED]


def test_failures_far_apart_do_not_open_it() -> None:
    service = Service()
    service.is_down = True
    for _ in range(10):
        assert service.ask() is None
        service.now += 6


def test_errors_that_are_not_the_services_do_not_count() -> None:
    service = Service()

    def wrong() -> None:
        raise KeyError("ours")

    for _ in range(5):
        with pytest.raises(KeyError):
            service.breaker.call(wrong)
    assert service.breaker.state is CircuitState.CLOSED


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 12)), max_size=60))
def test_it_never_stays_open_for_a_service_that_is_back(history: list[tuple[bool, float]]) -> None:
    service = Service()
    for is_down, passes_s in history:
        service.is_down = is_down
        service.ask()
        service.now += passes_s
    service.is_down = False
    service.now += POLICY.break_s
    assert [service.ask(), service.ask()] == ["here", "here"]
    assert service.breaker.state is CircuitState.CLOSED
