"""The time covered by intervals that may overlap."""

from __future__ import annotations

from collections.abc import Iterable


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) intervals: overlaps count once, gaps not at all."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
