"""The course of a job's loss: points by step, and a series of them in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One step of the whole job."""

    step: int
    time: float
    loss: float | None
    step_s: float
    samples_per_s: float | None
    grad_norm: float | None = None
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """One evaluation of the whole job."""

    step: int
    time: float
    loss: float


class ThinnedSeries(Generic[T]):
    """At most `capacity` points that cover the whole series evenly, and always the newest."""

    def __init__(self, capacity: int = 1000) -> None:
        self._capacity = capacity
        self._stride = 1
        self._num_added = 0
        self._points: list[T] = []
        self._newest: T | None = None

    def add(self, point: T) -> None:
        """Add the next point."""
        if self._num_added % self._stride == 0:
            self._points.append(point)
        self._num_added += 1
        self._newest = point
        if len(self._points) > self._capacity:
            self._points = self._points[::2]
            self._stride *= 2

    @property
    def num_added(self) -> int:
        """Points added so far."""
        return self._num_added

    def points(self) -> Sequence[T]:
        """Oldest first, the newest last."""
        if self._newest is None or (self._points and self._points[-1] is self._newest):
            return tuple(self._points)
        return (*self._points, self._newest)


_SMOOTHING = 0.9
_LEAST_LOSSES = 20
_NOISE_WIDTHS = 4.0


class LossFall:
    """How much of its fall a loss has risen again. No unit: it holds for losses of any scale and sign."""

    def __init__(self) -> None:
        self._num_losses = 0
        self._smooth = 0.0
        self._noise = 0.0
        self._first = 0.0
        self._best = 0.0

    def add(self, loss: float) -> None:
        """Add the loss of the next step."""
        self._num_losses += 1
        # A plain mean at first: the first loss alone would count for long.
        keep = min(_SMOOTHING, 1 - 1 / self._num_losses)
        self._noise = keep * self._noise + (1 - keep) * abs(loss - self._smooth) if self._num_losses > 1 else 0.0
        self._smooth = keep * self._smooth + (1 - keep) * loss
        if self._num_losses == _LEAST_LOSSES:
            self._first = self._best = self._smooth
        self._best = min(self._best, self._smooth)

    @property
    def regained_share(self) -> float | None:
        """0 at its lowest, 1 back where it began; None before there are enough losses.

        A fall that does not stand out from the scatter counts as one that just does: else noise would be a rise.
        """
        if self._num_losses < _LEAST_LOSSES:
            return None
        fall = max(self._first - self._best, _NOISE_WIDTHS * self._noise)
        share = (self._smooth - self._best) / fall if fall > 0 else 0.0
        return share if math.isfinite(share) else None  # losses near the largest float
