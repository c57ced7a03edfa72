"""The ring of the last operations."""

from __future__ import annotations

from pathlib import Path

from torsh_distributed import events
from torsh_distributed.comm.recording.flight_recorder import FlightRecorder


def test_the_last_operations_are_kept_and_numbered_by_group() -> None:
    recorder = FlightRecorder(capacity=3)
    for group in ("a", "b", "a", "a"):
        recorder.begin("all_reduce", group, 8)
    assert [(record.group, record.sequence) for record in recorder] == [("b", 1), ("a", 2), ("a", 3)]
    last = recorder.last("b")
    assert last is not None
    assert last.sequence == 1
    assert recorder.last("c") is None


def test_a_record_knows_its_caller_its_duration_and_its_error() -> None:
    recorder = FlightRecorder()
    record = recorder.begin("send", "world", 4, peer=1)
    assert record.duration_s is None
    assert "under way" in repr(record)
    assert record.call_site is not None
    assert record.call_site.startswith(f"{Path(__file__)}:")
    recorder.end(record, ValueError("lost"))
    assert record.duration_s is not None
    assert record.duration_s >= 0
    assert record.error == "ValueError: lost"


def test_the_end_of_an_operation_is_an_event() -> None:
    recorder, seen = FlightRecorder(), list[events.Event]()
    stop = events.subscribe(seen.append, events.CollectiveEvent)
    try:
        recorder.end(recorder.begin("recv", "world", 16, peer=2))
    finally:
        stop()
    (event,) = seen
    assert isinstance(event, events.CollectiveEvent)
    assert (event.op, event.group, event.num_bytes, event.peer, event.error) == ("recv", "world", 16, 2, None)
