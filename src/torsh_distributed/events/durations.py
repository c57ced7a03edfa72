"""Durations as events: the parts of a step, and waits for communication. Free of cost without a subscriber."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torsh_distributed.events.points import reached
from torsh_distributed.events.step_notes import note_phase, note_wait, wants_phases, wants_waits
from torsh_distributed.events.types import Phase

Item = TypeVar("Item")


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Around a part of a step: emits a PhaseEvent unless it raises."""
    reached(name)
    if not wants_phases():
        yield
        return
    started, cpu = time.monotonic(), time.thread_time()
    yield
    note_phase(name, started, time.monotonic(), (cpu, time.thread_time()))


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
    if not wants_waits():
        yield
        return
    reached(op)
    started, cpu = time.monotonic(), time.thread_time()
    yield
    ended = time.monotonic()
    note_wait(
        op,
        group,
        started,
        ended,
        (cpu, time.thread_time()),
        num_started=num_started,
        num_bytes=num_bytes,
        sequence=sequence,
    )
