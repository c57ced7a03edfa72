"""The bus: delivery by type, and handlers that fail without harm."""

from __future__ import annotations

import logging

import pytest

from torsh_distributed import events
from torsh_distributed.events import AlertEvent, Event, LogEvent, StepEvent


def test_a_subscriber_gets_its_types_and_no_others() -> None:
    seen: list[Event] = []
    end = events.subscribe(seen.append, StepEvent, AlertEvent)
    step = StepEvent(step=1, duration_s=0.5)
    events.emit(step)
    events.emit(LogEvent(level="info", message="not for you"))
    end()
    events.emit(step)
    assert seen == [step]


def test_without_types_everything_is_delivered() -> None:
    seen: list[Event] = []
    end = events.subscribe(seen.append)
    events.emit(LogEvent(level="info", message="a"))
    events.emit(StepEvent(step=1, duration_s=0.5))
    end()
    assert [event.kind for event in seen] == ["log", "step"]


def test_a_handler_that_raises_harms_neither_the_emitter_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise ZeroDivisionError

    ends = [events.subscribe(broken), events.subscribe(seen.append)]
    with caplog.at_level(logging.ERROR):
        events.emit(LogEvent(level="info", message="a"))
    for end in ends:
        end()
    assert len(seen) == 1
    assert "an event handler failed on LogEvent" in caplog.text


def test_wanted_says_whether_building_an_event_is_worth_it() -> None:
    assert not events.wanted(StepEvent)
    end = events.subscribe(lambda event: None, StepEvent)
    assert events.wanted(StepEvent)
    assert not events.wanted(LogEvent)
    end()
    assert not events.wanted(StepEvent)


def test_events_are_immutable_and_carry_time_and_rank() -> None:
    event = StepEvent(step=1, duration_s=0.5)
    assert event.rank == -1
    assert event.time > 1.7e9
    with pytest.raises(AttributeError):
        event.step = 2  # type: ignore[misc]


def test_every_event_has_a_kind_of_its_own() -> None:
    public = {name for name in events.__all__ if name.endswith("Event") and name != "Event"}
    kinds = events.event_types()
    assert {kind.__name__ for kind in kinds.values()} == public
    assert {"step", "collective", "bucket", "memory", "checkpoint", "membership", "alert", "log"} <= set(kinds)
