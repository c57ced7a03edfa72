"""Adds up the steps of one thread for the efficiency report. Pure: no clock, no groups."""

from __future__ import annotations

from collections import Counter, defaultdict

from torsh_distributed.comm.recording.span_account import PART_OF_PHASE, SpanAccount
from torsh_distributed.events import Phase
from torsh_distributed.train.efficiency.report import AxisTime, StepTimes


class Account:
    """The sums over steps, by part and by axis of the mesh; `SpanAccount` divides each step."""

    def __init__(self, started: float) -> None:
        self.num_steps = 0
        self._spans = SpanAccount(started, bubble_waits={"pp"})
        self._total = 0.0
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._operations: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def count(self, axis: str, *, num_operations: int, num_bytes: int) -> None:
        """Count operations started by a group along an axis, in any thread."""
        self._operations[axis] += num_operations
        self._bytes[axis] += num_bytes

    def add_phase(self, phase: Phase, start: float, duration: float) -> None:
        """Add a phase of a step that the thread has finished."""
        self._spans.add_phase(phase, start, duration)

    def add_wait(self, axis: str, start: float, duration: float) -> None:
        """Add the time the thread was blocked by an operation along an axis."""
        self._spans.add_wait(axis, start, duration)

    def end_step(self, now: float) -> None:
        """End a step: all time since the previous one, or since the start, belongs to it."""
        step = self._spans.end_step(now)
        for phase, seconds in step.phases.items():
            self._parts[PART_OF_PHASE[phase]] += seconds
        for axis, seconds in step.waits.items():
            self._waits[axis] += seconds
        self._total += step.step_s
        self.num_steps += 1

    def times(self, axes: tuple[str, ...]) -> StepTimes:
        """The mean step; `axes` come first, used or not."""
        per = 1 / self.num_steps
        found = [*axes, *(axis for axis in sorted({*self._operations, *self._waits}) if axis not in axes)]
        return StepTimes(
            step_s=self._total * per,
            compute_s=self._parts["compute"] * per,
            bubble_s=self._parts["bubble"] * per,
            optimizer_s=self._parts["optimizer"] * per,
            data_s=self._parts["data"] * per,
            other_s=self._parts["other"] * per,
            axes={
                axis: AxisTime(
                    num_operations=self._operations[axis] * per,
                    num_bytes=self._bytes[axis] * per,
                    wait_s=self._waits[axis] * per,
                )
                for axis in found
            },
        )
