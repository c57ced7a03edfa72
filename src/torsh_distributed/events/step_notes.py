"""The spans of a step as plain tuples, for whoever takes all of them.

Between two operations of a model Python runs with cold caches: making an event and passing it on takes 40 µs there, and
a step has ten. A note is a tuple and an append, and of a started operation the record that is kept anyway. Events are
made as well where something subscribes to them, such as the file of a recording.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torsh_distributed.events.bus import emit, wanted
from torsh_distributed.events.types import Phase, PhaseEvent, StepEvent, WaitEvent

_thread = threading.get_ident
_lock = threading.Lock()
# Replaced by a new tuple on every change, so that reading it needs no lock.
_takers: tuple[Callable[[Any], None], ...] = ()
_has_engine = False

CpuSpan = tuple[float, float]
"""The thread's own processor time (`time.thread_time`) at the start and at the end of a span."""


class PhaseNote(NamedTuple):
    """A part of a step ended, as PhaseEvent has it."""

    thread: int
    phase: Phase
    start_s: float
    end_s: float
    cpu: CpuSpan | None


class WaitNote(NamedTuple):
    """A thread waited for an operation, as WaitEvent has it."""

    thread: int
    op: str
    group: str
    start_s: float
    end_s: float
    cpu: CpuSpan | None
    num_started: int
    num_bytes: int


class StartedOperation(Protocol):
    """What a recorder keeps of an operation that goes on after the call. The record itself is the note of its start."""

    thread: int
    op: str
    group: str
    num_bytes: int
    sequence: int
    start_s: float
    end_s: float | None
    """None while it is under way."""

    @property
    def is_in_backward(self) -> bool:
        """Whether torch's autograd started it, as for DDP's buckets."""


class StepNote(NamedTuple):
    """A step of a plain loop ended with its optimizer, which is a phase of it: one note for both."""

    thread: int
    optimizer_s: float | None
    """When the optimizer began, on the monotonic clock; None in a step that is not looked at."""
    end_s: float
    end_cpu_s: float
    """The thread's own processor time at the end."""
    step: int
    duration_s: float
    loss: float | None
    num_samples: int | None
    learning_rate: float | None


def take_notes(take: Callable[[Any], None]) -> Callable[[], None]:
    """Call `take` with every note, in the thread that makes it; returns what ends that. It must not raise."""
    global _takers
    with _lock:
        _takers = (*_takers, take)

    def forget() -> None:
        global _takers
        with _lock:
            _takers = tuple(kept for kept in _takers if kept is not take)

    return forget


def wants_phases() -> bool:
    """Whether anybody wants to know of phases; ask before timing one."""
    return bool(_takers) or wanted(PhaseEvent, is_noted=True)


def wants_waits() -> bool:
    """Whether anybody wants to know of waits; ask before timing one."""
    return bool(_takers) or wanted(WaitEvent, is_noted=True)


def note_phase(phase: Phase, start_s: float, end_s: float, cpu: CpuSpan | None = None) -> None:
    """A part of a step ended in this thread."""
    if _takers:
        note = PhaseNote(_thread(), phase, start_s, end_s, cpu)
        for take in _takers:
            take(note)
    if wanted(PhaseEvent, is_noted=True):
        event = PhaseEvent(phase=phase, start_s=start_s, duration_s=end_s - start_s, thread=_thread())
        emit(event, is_noted=True)


def note_wait(
    op: str,
    group: str,
    start_s: float,
    end_s: float,
    cpu: CpuSpan | None = None,
    *,
    num_started: int = 0,
    num_bytes: int = 0,
    sequence: int | None = None,
) -> None:
    """This thread waited for an operation of a group, or has started one."""
    if _takers:
        note = WaitNote(_thread(), op, group, start_s, end_s, cpu, num_started, num_bytes)
        for take in _takers:
            take(note)
    if wanted(WaitEvent, is_noted=True):
        emit(
            WaitEvent(
                op=op,
                group=group,
                num_started=num_started,
                num_bytes=num_bytes,
                start_s=start_s,
                duration_s=end_s - start_s,
                sequence=sequence,
                thread=_thread(),
            ),
            is_noted=True,
        )


def note_started(operation: StartedOperation) -> None:
    """This thread has started an operation and goes on: the recorder's record of it."""
    for take in _takers:
        take(operation)
    if wanted(WaitEvent, is_noted=True):
        emit(
            WaitEvent(
                op=operation.op,
                group=operation.group,
                num_started=1,
                num_bytes=operation.num_bytes,
                start_s=operation.start_s,
                duration_s=time.monotonic() - operation.start_s,
                sequence=operation.sequence,
                thread=operation.thread,
            ),
            is_noted=True,
        )


def leave_steps_to_engine() -> None:
    """From now on an Engine reports this process's steps: its optimizers' steps are not counted beside it."""
    global _has_engine
    _has_engine = True


def has_engine() -> bool:
    """Whether an Engine reports this process's steps."""
    return _has_engine


def note_step(note: StepNote) -> None:
    """A step of a plain loop ended in this thread."""
    for take in _takers:
        take(note)
    if note.optimizer_s is not None and wanted(PhaseEvent, is_noted=True):
        took_s = note.end_s - note.optimizer_s
        phase = PhaseEvent(phase="optimizer", start_s=note.optimizer_s, duration_s=took_s, thread=note.thread)
        emit(phase, is_noted=True)
    if wanted(StepEvent, is_noted=True):
        emit(step_event(note, time.time()), is_noted=True)


def step_event(note: StepNote, moment: float) -> StepEvent:
    """The event that says what a note does; `moment` is the wall-clock time of its end."""
    return StepEvent(
        time=moment,
        step=note.step,
        duration_s=note.duration_s,
        loss=note.loss,
        num_samples=note.num_samples,
        learning_rate=note.learning_rate,
    )
