"""Spans of time as events: which part of a step a thread was in, and what held it up. Nothing when nobody listens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torsh_distributed.events.bus import emit, wanted
from torsh_distributed.events.types import Phase, PhaseEvent, WaitEvent

Item = TypeVar("Item")


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Around a part of a step: a PhaseEvent when it ends well."""
    if not wanted(PhaseEvent):
        yield
        return
    started = time.monotonic()
    yield
    emit(PhaseEvent(phase=name, start_s=started, duration_s=time.monotonic() - started))


def each_in_phase(name: Phase, items: Iterable[Item]) -> Iterator[Item]:
    """The items; the time it takes to get each is a part of a step."""
    source = iter(items)
    while True:
        with phase(name):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


@contextmanager
def waiting(op: str, group: str, *, num_started: int = 0, num_bytes: int = 0) -> Iterator[None]:
    """Around what holds a thread up until an operation of a group is done: a WaitEvent when it ends well."""
    if not wanted(WaitEvent):
        yield
        return
    started = time.monotonic()
    yield
    emit(
        WaitEvent(
            op=op,
            group=group,
            num_started=num_started,
            num_bytes=num_bytes,
            start_s=started,
            duration_s=time.monotonic() - started,
        )
    )
