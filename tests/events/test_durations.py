"""Durations: one event for each phase and wait that ends without an error, none without a subscriber."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from torsh_distributed import events
from torsh_distributed.events import Event, PhaseEvent, WaitEvent


@pytest.fixture
def seen() -> list[Event]:
    return []


@pytest.fixture
def subscribed(seen: list[Event]) -> Callable[[], None]:
    return events.subscribe(seen.append, PhaseEvent, WaitEvent)


def test_phases_nest_and_end_inner_first(seen: list[Event], subscribed: Callable[[], None]) -> None:
    before = time.monotonic()
    with events.phase("schedule"), events.phase("stage"):
        pass
    subscribed()
    inner, outer = seen
    assert isinstance(inner, PhaseEvent)
    assert isinstance(outer, PhaseEvent)
    assert (inner.phase, outer.phase) == ("stage", "schedule")
    assert before <= outer.start_s <= inner.start_s
    assert inner.duration_s <= outer.duration_s


def test_a_phase_that_raises_is_not_an_event(seen: list[Event], subscribed: Callable[[], None]) -> None:
    with pytest.raises(ZeroDivisionError), events.phase("forward"):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), events.waiting("all_reduce", "world"):
        raise ZeroDivisionError
    subscribed()
    assert seen == []


def test_each_item_is_a_phase_and_the_consumer_is_not(seen: list[Event], subscribed: Callable[[], None]) -> None:
    counts = []
    for item in events.each_in_phase("data", range(3)):
        counts.append((item, len(seen)))
    subscribed()
    assert counts == [(0, 1), (1, 2), (2, 3)]


def test_a_wait_has_its_operation_and_size(seen: list[Event], subscribed: Callable[[], None]) -> None:
    with events.waiting("all_reduce", "world", num_started=1, num_bytes=64):
        pass
    subscribed()
    [wait] = seen
    assert isinstance(wait, WaitEvent)
    assert (wait.op, wait.group, wait.num_started, wait.num_bytes) == ("all_reduce", "world", 1, 64)
    assert wait.duration_s >= 0


def test_a_subscriber_that_arrives_during_a_phase_gets_the_next_one(seen: list[Event]) -> None:
    with events.phase("forward"):
        end = events.subscribe(seen.append, PhaseEvent)
    with events.phase("backward"):
        pass
    end()
    assert [event.phase for event in seen if isinstance(event, PhaseEvent)] == ["backward"]
