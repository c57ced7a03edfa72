"""The time ahead as slots with an intensity: what the feed forecasts, and beyond that the same hour a day before."""

from __future__ import annotations

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.carbon.intensity import IntensitySeries
from torsh_distributed.green.schedule.allocation import TimeSlot

SLOT_S = 1800.0
_DAY_S = 24 * 3600.0


def slots_ahead(series: IntensitySeries, *, now: float, until: float) -> tuple[list[TimeSlot], float]:
    """(slots of half an hour from now to `until`, the time up to which the feed knows them).

    Nothing is invented: a slot beyond the forecast takes the value of the same time on an earlier day that is known.
    Raises InvalidArgument if there is none for a slot.
    """
    if until <= now:
        raise InvalidArgument("the deadline is in the past", hint="give one ahead, such as 96h")
    known_until = max((one.end if one.end is not None else until for one in series.values), default=now)
    found = []
    start = now
    while start < until:
        end = min(start + SLOT_S, until)
        found.append(TimeSlot(start, end, _value(series, (start + end) / 2)))
        start = end
    return found, min(known_until, until)


def _value(series: IntensitySeries, moment: float) -> float:
    for days in range(8):
        value = series.at(moment - days * _DAY_S)
        if value is not None and value.age_s(moment - days * _DAY_S) in (None, 0.0):
            return value.g_per_kwh
    raise InvalidArgument(
        "the feed knows neither this time nor the same hour of a day before it",
        hint="give a nearer deadline, or a feed or file that has a day or more",
    )
