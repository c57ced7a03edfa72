"""Small operations gather until somebody waits, a larger one comes or the cycle is over; nothing is left behind."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from torsh_distributed.migrate.horovod.negotiation.outbox import Outbox
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, PendingOp, Request

LONG_S = 3600.0


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    made = Outbox(LONG_S)
    yield made
    made.close()


def op(name: str) -> PendingOp:
    return PendingOp(Request(name, OpKind.ALLREDUCE), [])


def ready(outbox: Outbox, timeout_ms: int = 0) -> list[int]:
    poll = select.poll()
    poll.register(outbox.wake_fd, select.POLLIN)
    poll.register(outbox.alarm_fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_ms)]


def test_small_ones_stay_until_somebody_waits(outbox: Outbox) -> None:
    small = [op(f"small.{index}") for index in range(3)]
    assert [outbox.put(one, may_gather=True) for one in small] == [False] * 3
    assert outbox.take() == []
    assert outbox.hurry()
    assert not outbox.hurry()  # once is enough
    assert outbox.take() == small
    assert not outbox.hurry()  # nothing is in it


def test_a_large_one_takes_the_small_ones_along(outbox: Outbox) -> None:
    small, large = op("small"), op("large")
    outbox.put(small, may_gather=True)
    assert outbox.put(large, may_gather=False)
    outbox.wake()
    assert ready(outbox) == [outbox.wake_fd]
    outbox.was_polled(outbox.wake_fd)
    assert ready(outbox) == []
    assert outbox.take() == [small, large]


def test_a_thread_that_looks_again_anyway_is_not_woken(outbox: Outbox) -> None:
    assert outbox.put(op("first"), may_gather=False)
    outbox.take()
    assert not outbox.put(op("second"), may_gather=False)
    assert [one.request.name for one in outbox.take()] == ["second"]
    assert outbox.take() == []  # it sleeps now
    assert outbox.put(op("third"), may_gather=False)


def test_the_alarm_ends_a_cycle_and_is_off_when_all_is_taken() -> None:
    outbox = Outbox(0.001)
    try:
        outbox.put(op("small"), may_gather=True)
        assert ready(outbox, timeout_ms=60_000) == [outbox.alarm_fd]
        outbox.was_polled(outbox.alarm_fd)
        assert ready(outbox) == []
        assert len(outbox.take()) == 1
        outbox.put(op("small"), may_gather=True)
        outbox.hurry()
        outbox.take()
        assert ready(outbox, timeout_ms=20) == []
    finally:
        outbox.close()


def test_without_a_cycle_nothing_gathers() -> None:
    outbox = Outbox(0.0)
    try:
        assert outbox.put(op("small"), may_gather=True)
        assert len(outbox.take()) == 1
    finally:
        outbox.close()
