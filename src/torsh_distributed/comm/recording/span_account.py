"""Adds up the spans of one thread so every moment of a step is counted once. Pure: no clock, no groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field

OTHER = "other"
BUBBLE_PHASE = "schedule"
"""A pipeline's schedule: what no stage inside it covers is a bubble."""


@dataclass
class StepSpans:
    """The seconds of one step; phases and waits together add up to `step_s`."""

    step_s: float = 0.0
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase, without the spans inside it; `other` is what no span covers."""
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By what was waited for."""


@dataclass(slots=True)
class _Span:
    start: float
    end: float
    phase: str
    wait: str | None
    inside: float
    """Seconds of it that belong to the spans directly inside it."""

    @property
    def own(self) -> float:
        return self.end - self.start - self.inside


class SpanAccount:
    """Spans are added when they end, so inner spans come before the outer one; time no span covers is `other`.

    A wait named in `bubble_waits`, directly inside a pipeline's schedule, is waiting for another stage: a bubble.
    """

    def __init__(self, started: float, *, bubble_waits: Set[str]) -> None:
        self._begun = started
        self._bubble_waits = bubble_waits
        self._step = StepSpans()
        self._open: list[_Span] = []

    def add_phase(self, phase: str, start: float, duration: float) -> None:
        """Add a phase of a step that the thread has finished."""
        self._add(start, duration, phase, None, absorbs=self._bubble_waits if phase == BUBBLE_PHASE else frozenset())

    def add_wait(self, what: str, start: float, duration: float) -> None:
        """Add the time the thread was blocked."""
        self._add(start, duration, OTHER, what, absorbs=frozenset())

    def end_step(self, now: float) -> StepSpans:
        """End a step: all time since the previous one, or since the start, belongs to it."""
        covered = 0.0
        for span in self._open:
            covered += span.end - span.start
            self._book(span)
        self._open.clear()
        ended, self._step = self._step, StepSpans()
        ended.phases[OTHER] += now - self._begun - covered
        ended.step_s = now - self._begun
        self._begun = now
        return ended

    def _add(self, start: float, duration: float, phase: str, wait: str | None, *, absorbs: Set[str]) -> None:
        # A span that began before measuring did counts from there on.
        span = _Span(max(start, self._begun), start + duration, phase, wait, 0.0)
        while self._open and self._open[-1].start >= span.start:
            inner = self._open.pop()
            span.inside += inner.end - inner.start
            if inner.wait in absorbs:
                inner.phase, inner.wait = phase, None
            self._book(inner)
        self._open.append(span)

    def _book(self, span: _Span) -> None:
        if span.wait is None:
            self._step.phases[span.phase] += span.own
        else:
            self._step.waits[span.wait] += span.own
