"""Carbon intensity of a grid: values with their period, kind and source, and what is known of a moment."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from torsh_distributed.errors import InvalidArgument

Signal = Literal["average", "marginal"]
"""Of all power on the grid, or of what one kilowatt-hour more adds. They differ, and are never mixed."""
Basis = Literal["measured", "forecast", "yearly mean", "given"]

MOST_G_PER_KWH = 2500.0
"""The dirtiest lignite is below; more is an error of the feed."""
STALE_S = 3600.0
"""A value whose period ended longer ago is marked."""
USELESS_S = 24 * 3600.0
"""One whose period ended longer ago says nothing about now."""


@dataclass(frozen=True, slots=True)
class Intensity:
    """Grams of CO2 for a kilowatt-hour from `start` to `end`, in seconds since the epoch; open where None."""

    g_per_kwh: float
    start: float | None
    end: float | None
    signal: Signal
    basis: Basis
    source: str
    zone: str
    renewable_share: float | None = None
    """From 0 to 1, where the feed tells it."""

    def age_s(self, now: float) -> float | None:
        """Seconds since its period ended; 0 within it, None for one without a time."""
        return None if self.end is None else max(0.0, now - self.end)

    def is_stale(self, now: float) -> bool:
        """Whether it is about an earlier time than now."""
        age_s = self.age_s(now)
        return age_s is not None and age_s > STALE_S


class IntensitySeries:
    """Values in the order of time. Those that cannot be true are left out and counted."""

    def __init__(self, values: Iterable[Intensity]) -> None:
        given = list(values)
        kept = [one for one in given if 0 <= one.g_per_kwh <= MOST_G_PER_KWH]
        self.num_absurd = len(given) - len(kept)
        self.values: Sequence[Intensity] = sorted(kept, key=lambda one: one.start or 0.0)
        self._starts = [one.start or 0.0 for one in self.values]

    def at(self, time: float) -> Intensity | None:
        """The value of a moment: of its period, or the last one before it unless that is useless."""
        at = bisect.bisect_right(self._starts, time)
        if at == 0:
            return None
        found = self.values[at - 1]
        age_s = found.age_s(time)
        return found if age_s is None or age_s <= USELESS_S else None

    def span(self) -> str:
        """What it is about, for people."""
        times = [moment for one in self.values for moment in (one.start, one.end) if moment is not None]
        return f"values from {show_time(min(times))} to {show_time(max(times))}" if times else "no value at all"

    def between(self, begin: float, end: float) -> list[Intensity]:
        """Those whose period touches it."""
        return [
            one
            for one in self.values
            if (one.start is None or one.start < end) and (one.end is None or one.end > begin)
        ]


def show_time(moment: float) -> str:
    """As `read_time` takes it."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%MZ")


def read_time(text: str) -> float:
    """Seconds since the epoch of an ISO 8601 time; one without a zone is UTC."""
    try:
        found = datetime.fromisoformat(text.strip())
        if not 1 < found.year < 9999:  # its seconds may be no date again
            raise ValueError
    except ValueError:
        raise InvalidArgument("this is not a time", hint="write 2026-11-18T16:00Z", got=text[:60]) from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
