"""Durations as events: the parts of a step, and waits for communication. Free of cost without a subscriber."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torsh_distributed.events.bus import emit, wanted
from torsh_distributed.events.points import reached
from torsh_distributed.events.types import Phase, PhaseEvent, WaitEvent

Item = TypeVar("Item")


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Around a part of a step: emits a PhaseEvent unless it raises."""
    reached(name)
    if not wanted(PhaseEvent):
        yield
        return
    started = time.monotonic()
    yield
    ended = time.monotonic()
    emit(PhaseEvent(phase=name, start_s=started, duration_s=ended - started, thread=threading.get_ident()))


def each_in_phase(name: Phase, items: Iterable[Item]) -> Iterator[Item]:
    """The items; emits the time it takes to get each one as a phase."""
    source = iter(items)
    while True:
        with phase(name):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


@contextmanager
def waiting(
    op: str, group: str, *, num_started: int = 0, num_bytes: int = 0, sequence: int | None = None
) -> Iterator[None]:
    """Around a wait for an operation of a group: emits a WaitEvent unless it raises."""
    if not wanted(WaitEvent):
        yield
        return
    reached(op)
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
            sequence=sequence,
            thread=threading.get_ident(),
        )
    )
