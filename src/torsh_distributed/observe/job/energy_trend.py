"""The course of a job's energy over time, in at most some dozens of equal spans: wider ones the longer it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SPANS = 96


@dataclass(slots=True)
class EnergySpan:
    """What was counted in a span of time."""

    begin: float
    end: float
    joules: float = 0.0
    grams: float = 0.0
    graded_j: float = 0.0
    """The part with a known intensity."""
    renewable_j: float = 0.0
    shared_j: float = 0.0
    """The part for which a renewable share was told."""
    samples: int = 0
    """Of steps that ended in it, those that were undone later among them."""

    @property
    def mean_w(self) -> float:
        """Power over the span."""
        return self.joules / (self.end - self.begin)

    @property
    def g_per_kwh(self) -> float | None:
        """Intensity by energy; None if it was not known."""
        return self.grams / self.graded_j * 3.6e6 if self.graded_j > 0 else None

    @property
    def samples_per_joule(self) -> float | None:
        """How efficient it was; None where no step ended."""
        return self.samples / self.joules if self.samples and self.joules > 0 else None

    @property
    def renewable_share(self) -> float | None:
        """By energy; None if it was not told."""
        return self.renewable_j / self.shared_j if self.shared_j > 0 else None


class EnergyTrend:
    """Adds up intervals by the span that their middle lies in; when there are too many spans, two become one."""

    def __init__(self, width_s: float = 1.0) -> None:
        self._width_s = width_s
        self._spans: dict[int, EnergySpan] = {}

    def add(
        self, time: float, duration_s: float, joules: float, *, g_per_kwh: float | None, renewable_share: float | None
    ) -> None:
        """An interval of a meter that ended at `time`."""
        number = math.floor((time - duration_s / 2) / self._width_s)
        begin, end = time - duration_s, time
        span = self._spans.setdefault(number, EnergySpan(begin, end))
        span.begin, span.end = min(span.begin, begin), max(span.end, end)
        span.joules += joules
        if g_per_kwh is not None:
            span.grams += joules / 3.6e6 * g_per_kwh
            span.graded_j += joules
        if renewable_share is not None:
            span.renewable_j += joules * renewable_share
            span.shared_j += joules
        while len(self._spans) > MAX_SPANS:
            self._widen()

    def add_samples(self, time: float, samples: int) -> None:
        """A step ended at `time`, in what was added already."""
        if samples and self._spans:
            wanted = math.floor(time / self._width_s)
            self._spans[min(self._spans, key=lambda number: abs(number - wanted))].samples += samples

    def _widen(self) -> None:
        self._width_s *= 2
        before, self._spans = self._spans, {}
        for number, span in sorted(before.items()):
            kept = self._spans.setdefault(number // 2, span)
            if kept is not span:
                kept.begin, kept.end = min(kept.begin, span.begin), max(kept.end, span.end)
                for name in ("joules", "grams", "graded_j", "renewable_j", "shared_j", "samples"):
                    setattr(kept, name, getattr(kept, name) + getattr(span, name))

    @property
    def spans(self) -> list[EnergySpan]:
        """In the order of time."""
        return [span for _, span in sorted(self._spans.items())]
