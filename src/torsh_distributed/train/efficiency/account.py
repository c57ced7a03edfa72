"""Adds up the spans of one thread so every moment of a step is counted once. Pure: no clock, no groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from torsh_distributed.events import Phase
from torsh_distributed.train.efficiency.report import AxisTime, StepTimes

_PART_OF: dict[str, str] = {
    "forward": "compute",
    "backward": "compute",
    "stage": "compute",
    "schedule": "bubble",
    "optimizer": "optimizer",
    "data": "data",
}
"""What the time of a phase is spent on, except for the spans inside it."""


@dataclass
class _Span:
    start: float
    end: float
    part: str
    axis: str | None
    inside: float
    """Seconds of it that belong to the spans directly inside it."""

    @property
    def own(self) -> float:
        return self.end - self.start - self.inside


class Account:
    """Spans are added when they end, so inner spans come before the outer one; time no span covers is `other`."""

    def __init__(self, started: float) -> None:
        self.num_steps = 0
        self._begun = started
        self._total = 0.0
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._operations: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._open: list[_Span] = []

    def count(self, axis: str, *, num_operations: int, num_bytes: int) -> None:
        """Count operations started by a group along an axis, in any thread."""
        self._operations[axis] += num_operations
        self._bytes[axis] += num_bytes

    def add_phase(self, phase: Phase, start: float, duration: float) -> None:
        """Add a phase of a step that the thread has finished."""
        # Waiting between the stages of a schedule is waiting for another stage, which is a bubble.
        self._add(start, duration, _PART_OF[phase], None, absorbs="pp" if phase == "schedule" else None)

    def add_wait(self, axis: str, start: float, duration: float) -> None:
        """Add the time the thread was blocked by an operation along an axis."""
        self._add(start, duration, "wait", axis)

    def end_step(self, now: float) -> None:
        """End a step: all time since the previous one, or since the start, belongs to it."""
        covered = 0.0
        for span in self._open:
            covered += span.end - span.start
            self._book(span)
        self._open.clear()
        self._parts["other"] += now - self._begun - covered
        self._total += now - self._begun
        self._begun = now
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

    def _add(self, start: float, duration: float, part: str, axis: str | None, *, absorbs: str | None = None) -> None:
        # A span that began before measuring did counts from there on.
        span = _Span(max(start, self._begun), start + duration, part, axis, 0.0)
        while self._open and self._open[-1].start >= span.start:
            inner = self._open.pop()
            span.inside += inner.end - inner.start
            if absorbs is not None and inner.axis == absorbs:
                inner.part, inner.axis = part, None
            self._book(inner)
        self._open.append(span)

    def _book(self, span: _Span) -> None:
        if span.axis is None:
            self._parts[span.part] += span.own
        else:
            self._waits[span.axis] += span.own
