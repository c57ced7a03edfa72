"""A predicted time of a step as people read it: milliseconds, or seconds where those would have too many digits."""

from __future__ import annotations

_SECONDS_FROM = 10.0


def step_text(seconds: float) -> str:
    """Such as `38.5 ms` or `396.1 s`."""
    return f"{seconds:,.1f} s" if seconds >= _SECONDS_FROM else f"{seconds * 1e3:,.1f} ms"


def samples_text(samples_per_s: float) -> str:
    """Samples in a second; of slow steps the first digits that are not zero."""
    return f"{samples_per_s:,.1f}" if samples_per_s >= 1 else f"{samples_per_s:.3g}"
