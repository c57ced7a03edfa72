"""The time ahead as slots with an intensity: what the feed forecasts, and beyond that the same hour a day before."""

from __future__ import annotations

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.carbon.intensity import Intensity, IntensitySeries
from torsh_distributed.green.schedule.allocation import TimeSlot

SLOT_S = 1800.0
_MAX_SLOTS = 2000
_DAY_S = 24 * 3600.0


def slots_ahead(series: IntensitySeries, *, now: float, until: float) -> tuple[list[TimeSlot], float]:
    """(slots from now to `until`, the time up to which the feed knows them).

    A slot is as long as the shortest value, or half an hour where values last longer than an hour, and ends where
    values end. Nothing is invented: a slot beyond the forecast takes the value of the same time on an earlier day that
    is known. Raises InvalidArgument if there is none for a slot.
    """
    if until <= now:
        raise InvalidArgument("the deadline is in the past", hint="give one ahead, such as 96h")
    known_until = max((one.end if one.end is not None else until for one in series.values), default=now)
    slot_s = max(_shortest(series), (until - now) / _MAX_SLOTS)
    phase = next((one.start for one in series.values if one.start is not None), 0.0)
    found = []
    start = now
    while start < until - 1e-6:
        # A millionth: the sum of two floats may fall just short of a boundary.
        end = min(phase + ((start - phase + 1e-6 * slot_s) // slot_s + 1) * slot_s, until)
        value = _value(series, (start + end) / 2)
        found.append(TimeSlot(start, end, value.g_per_kwh, value.renewable_share))
        start = end
    return found, min(known_until, until)


def _shortest(series: IntensitySeries) -> float:
    lengths = [one.end - one.start for one in series.values if one.start is not None and one.end is not None]
    shortest = min([length for length in lengths if length > 0], default=SLOT_S)
    return shortest if shortest <= 2 * SLOT_S else SLOT_S


def _value(series: IntensitySeries, moment: float) -> Intensity:
    for days in range(8):
        value = series.at(moment - days * _DAY_S)
        if value is not None and value.age_s(moment - days * _DAY_S) in (None, 0.0):
            return value
    raise InvalidArgument(
        "the feed knows neither this time nor the same hour of a day before it",
        hint="give a nearer deadline, or a feed or file that has a day or more",
    )
