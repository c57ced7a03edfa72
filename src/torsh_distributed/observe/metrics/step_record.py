"""One step of one rank, as it travels to the launcher: where its seconds went."""

from __future__ import annotations

import binascii
import math
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torsh_distributed.comm.recording.span_account import POINT_TO_POINT, SpanAccount, StepSpans
from torsh_distributed.events import step_notes

MAX_TIMELINE_SPANS = 80


class TrainingSpans:
    """One thread's. `averaged_group` is the group of torch's DDP, if its operations are recorded.

    DDP waits in C++ at the end of backward, where nothing tells of it. But it waits for the operation that it started
    last, and the recorder knows when that ended. So what it waits is known without a hook in backward.
    """

    def __init__(self, started_s: float) -> None:
        self.averaged_group: str | None = None
        self.averaged_s = 0.0
        """Waits for that group that no note tells of."""
        self.timeline: list[list[Any]] = []
        """The spans since the last step: [name, start, seconds]."""
        self._account = SpanAccount(started_s, bubble_waits=POINT_TO_POINT)
        self._average: step_notes.StartedOperation | None = None
        self._cpu_s: float | None = None
        self._idle_cpu_s = 0.0
        self._is_cpu_known = True

    def add_phase(self, phase: str, start_s: float, end_s: float, cpu: step_notes.CpuSpan | None) -> None:
        """A part of a step ended."""
        average = self._average
        if average is not None:
            if start_s < average.start_s:  # a backward that was timed, with the wait inside it
                self._average = None
            else:
                self._end_average(start_s)
        if phase == "data":
            self._add_idle(cpu)
        self._account.add_phase(phase, start_s, end_s - start_s)
        self._draw(phase, start_s, end_s)

    def add_wait(self, note: step_notes.WaitNote) -> None:
        """A wait ended."""
        self._end_average(note.start_s)
        self._add_idle(note.cpu)
        self._account.add_wait(note.op, note.start_s, note.end_s - note.start_s)
        self._draw(f"wait: {note.op}", note.start_s, note.end_s)

    def add_start(self, started: step_notes.StartedOperation) -> None:
        """An operation was started; the thread went on."""
        if started.group == self.averaged_group and started.is_in_backward:
            self._average = started  # backward computed on after the one before it
        else:
            self._end_average(started.start_s)

    def end_step(self, now_s: float, cpu_s: float | None) -> tuple[StepSpans, float | None]:
        """A step ended: its spans, and the processor time that it computed; None where it is not known."""
        self._end_average(now_s)
        before_s, self._cpu_s = self._cpu_s, cpu_s
        idle_s, self._idle_cpu_s = self._idle_cpu_s, 0.0
        is_known, self._is_cpu_known = self._is_cpu_known, True
        computed_s = cpu_s - before_s - idle_s if is_known and cpu_s is not None and before_s is not None else None
        return self._account.end_step(now_s), computed_s

    def _end_average(self, now_s: float) -> None:
        """The thread does something else at `now_s`: until then it waited for the last average, if that was over.

        It slept in that time, as C++ waits, so there is no processor time to take off.
        """
        average, self._average = self._average, None
        if average is None:
            return
        start_s, end_s = average.start_s, average.end_s
        if end_s is not None and start_s < end_s <= now_s:
            self._account.add_wait(average.op, start_s, end_s - start_s)
            self.averaged_s += end_s - start_s
            self._draw(f"wait: {average.op}", start_s, end_s)

    def _add_idle(self, cpu: step_notes.CpuSpan | None) -> None:
        if cpu is None:
            self._is_cpu_known = False
        else:
            self._idle_cpu_s += cpu[1] - cpu[0]

    def _draw(self, name: str, start_s: float, end_s: float) -> None:
        if len(self.timeline) < MAX_TIMELINE_SPANS:
            self.timeline.append([name, start_s, end_s - start_s])


class RunDelay:
    """How long a thread was ready to run while others had its core, as the kernel counts it."""

    def __init__(self) -> None:
        self._thread = 0
        self._path = ""
        self._total_s: float | None = None

    def read(self, thread: int) -> float | None:
        """Seconds since the last call; None at the first one for a thread, and where the kernel does not count it."""
        if thread != self._thread:
            self._thread, self._total_s = thread, None
            number = next((one.native_id for one in threading.enumerate() if one.ident == thread), None)
            self._path = f"/proc/{os.getpid()}/task/{number}/schedstat" if number is not None else ""
        before_s, self._total_s = self._total_s, self._read()
        return self._total_s - before_s if self._total_s is not None and before_s is not None else None

    def _read(self) -> float | None:
        try:
            return int(Path(self._path).read_bytes().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None


class StepRecord(NamedTuple):
    """One step. The parts add up to `step_s`; a part that was not measured is None.

    Of steps that were not looked at, forward, backward and optimizer are part of `other_s`.
    """

    step: int
    time: float
    """Wall-clock time of its end."""
    step_s: float
    """From the end of the step before to the end of this one."""
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    wait_s: float | None
    """Waiting for other ranks; None where the backend cannot tell."""
    bubble_s: float | None
    data_s: float | None
    other_s: float
    loss: float | None = None
    num_samples: int | None = None
    is_skipped: bool = False
    preempted_s: float | None = None
    """Of its busy time, the seconds in which it was ready to run and other processes had its core."""
    grad_norm: float | None = None
    learning_rate: float | None = None

    @property
    def busy_s(self) -> float:
        """The time in which the rank waited for nobody and for no data."""
        return self.step_s - (self.wait_s or 0.0) - (self.data_s or 0.0) - (self.bubble_s or 0.0)

    @property
    def own_s(self) -> float:
        """The busy time that is the rank's own: without what others took of its core."""
        return max(0.0, self.busy_s - (self.preempted_s or 0.0))


def pack_steps(records: Iterable[StepRecord]) -> str:
    """Steps as one text for JSON, None as NaN: writing digits was a third of what a summary cost."""
    rows = [_LAYOUT.pack(*[math.nan if value is None else value for value in record]) for record in records]
    return binascii.b2a_base64(b"".join(rows), newline=False).decode("ascii")


def unpack_steps(text: Any, *, most: int) -> tuple[list[StepRecord], int]:
    """The newest of what another process packed, and how many of them are not steps."""
    if not isinstance(text, str):
        return [], int(text is not None)
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return [], 1
    found: list[StepRecord] = []
    num_bad = int(len(data) % _LAYOUT.size != 0)
    rows = memoryview(data)[: len(data) // _LAYOUT.size * _LAYOUT.size][-most * _LAYOUT.size :]
    for row in _LAYOUT.iter_unpack(rows):
        values: list[Any] = [None if value != value else value for value in row]
        if math.inf in values or -math.inf in values or None in (values[0], values[1], values[2], values[_OTHER]):
            num_bad += 1
            continue
        values[0] = int(values[0])
        if values[_SAMPLES] is not None:
            values[_SAMPLES] = int(values[_SAMPLES])
        values[_SKIPPED] = bool(values[_SKIPPED])
        found.append(StepRecord._make(values))
    return found, num_bad


_LAYOUT = struct.Struct("<2d8f2d4f")
"""The fields in their order. Seconds have seven digits: a rank of a fast loop has hundreds of steps in a summary."""
_OTHER, _SAMPLES, _SKIPPED = map(StepRecord._fields.index, ("other_s", "num_samples", "is_skipped"))
PARTS: Sequence[str] = ("forward", "backward", "optimizer", "wait", "bubble", "data", "other")
"""The parts of a step, in the order in which they are shown."""


def share_of_steps(steps: Sequence[StepRecord], name: str) -> float | None:
    """The share of the steps' time that a part, such as `wait_s`, takes; None where a step did not measure it."""
    values = [getattr(step, name) for step in steps]
    total_s = sum(step.step_s for step in steps)
    return sum(values) / total_s if values and None not in values and total_s > 0 else None
