"""The spans of the training thread, added up by step: what it did, what it waited for, and what it computed itself."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

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
