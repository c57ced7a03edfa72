"""Adds up the spans of one thread so every moment of a step is counted once. Pure: no clock, no groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) intervals: overlaps count once, gaps not at all."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


OTHER = "other"
_NOTHING: frozenset[str] = frozenset()
BUBBLE_PHASE = "schedule"
"""A pipeline's schedule: what no stage inside it covers is a bubble."""
PART_OF_PHASE = {
    "forward": "compute",
    "backward": "compute",
    "stage": "compute",
    BUBBLE_PHASE: "bubble",
    "optimizer": "optimizer",
    "data": "data",
    OTHER: OTHER,
}
"""What the time of a phase is spent on, except for the spans inside it: for every report on steps."""
POINT_TO_POINT = frozenset({"send", "recv", "batch_isend_irecv"})
"""Operations between two stages."""


class StepSpans:
    """The seconds of one step; phases and waits together add up to `step_s`."""

    __slots__ = ("phases", "step_s", "waits")

    def __init__(self) -> None:
        self.step_s = 0.0
        self.phases: defaultdict[str, float] = defaultdict(float)
        """By phase, without the spans inside it; `other` is what no span covers."""
        self.waits: defaultdict[str, float] = defaultdict(float)
        """By what was waited for."""

    def add(self, phase: str, wait: str | None, seconds: float) -> None:
        """Add the seconds of a span that are its own."""
        if wait is None:
            self.phases[phase] += seconds
        else:
            self.waits[wait] += seconds


class SpanAccount:
    """Spans are added when they end, so inner spans come before the outer one; time no span covers is `other`.

    A wait named in `bubble_waits`, directly inside a pipeline's schedule, is waiting for another stage: a bubble.
    """

    def __init__(self, started: float, *, bubble_waits: Set[str]) -> None:
        self._begun = started
        self._bubble_waits = bubble_waits
        self._step = StepSpans()
        self._open: list[tuple[float, float, str, str | None, float]] = []
        """Spans that no other encloses so far: start, end, phase, what was waited for, and the seconds of it that
        belong to the spans directly inside it."""

    def add_phase(self, phase: str, start: float, duration: float) -> None:
        """Add a phase of a step that the thread has finished."""
        self._add(start, duration, phase, None, self._bubble_waits if phase == BUBBLE_PHASE else _NOTHING)

    def add_wait(self, what: str, start: float, duration: float) -> None:
        """Add the time the thread was blocked."""
        self._add(start, duration, OTHER, what, _NOTHING)

    def end_step(self, now: float) -> StepSpans:
        """End a step: all time since the previous one, or since the start, belongs to it."""
        ended, self._step = self._step, StepSpans()
        step_s = uncovered = now - self._begun
        for start, end, phase, wait, inside in self._open:
            uncovered -= end - start
            ended.add(phase, wait, end - start - inside)
        self._open.clear()
        ended.phases[OTHER] += uncovered
        ended.step_s = step_s
        self._begun = now
        return ended

    def _add(self, start: float, duration: float, phase: str, wait: str | None, absorbs: Set[str]) -> None:
        end, inside = start + duration, 0.0
        if start < self._begun:  # a span that began before measuring did counts from there on
            start = self._begun
        spans = self._open
        while spans and spans[-1][0] >= start:
            inner_start, inner_end, inner_phase, inner_wait, inner_inside = spans.pop()
            inside += inner_end - inner_start
            if inner_wait in absorbs:
                inner_phase, inner_wait = phase, None
            self._step.add(inner_phase, inner_wait, inner_end - inner_start - inner_inside)
        spans.append((start, end, phase, wait, inside))
