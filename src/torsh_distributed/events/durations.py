"""Durations as events: the parts of a step, and waits for communication. Free of cost without a subscriber.

Points that training passes: the start of a step, of its parts, of an operation, of a save.
Events tell what has happened; a watcher of points is called before it does, and what it raises is raised there. Fault
injection is the one user. Without a watcher a point checks one tuple.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torsh_distributed.events.step_notes import note_phase, note_wait, wants_phases, wants_waits
from torsh_distributed.events.types import Phase

PointWatcher = Callable[[str, int | None], None]
"""Called with the point's name, and with the number of updates done where a step begins."""

_lock = threading.Lock()
# Replaced by a new tuple on every change, so that reading it needs no lock.
_watchers: tuple[PointWatcher, ...] = ()


def reached(point: str, step: int | None = None) -> None:
    """This process is about to do what `point` names: step, data, forward, backward, optimizer, save, all_reduce, …

    `step` is given with the point `step` alone: how many updates are done. Loops of one's own call
    `reached("step", number)` so that faults find their step.
    """
    for watcher in _watchers:
        watcher(point, step)


def watch_points(watcher: PointWatcher) -> Callable[[], None]:
    """Call `watcher` at every point of this process, in the thread that reaches it; returns what ends that."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)

    def forget() -> None:
        global _watchers
        with _lock:
            _watchers = tuple(kept for kept in _watchers if kept is not watcher)

    return forget


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
