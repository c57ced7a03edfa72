"""A series of any length in bounded memory: as it grows, every second point is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


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
