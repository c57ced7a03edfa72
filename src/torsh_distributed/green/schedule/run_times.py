"""When to run a job, what that saves against running it now, and what the answer stands on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from torsh_distributed.errors import CommunicationError, InvalidArgument, TorshError, first_line
from torsh_distributed.green.carbon.feeds import CarbonFeed, series_of
from torsh_distributed.green.carbon.intensity import Intensity, read_time, show_time
from torsh_distributed.green.schedule.allocation import JobShape, TimeSlot, WorkerSchedule, allocate, run_now
from torsh_distributed.green.schedule.forecast import slots_ahead

ScheduleAction = Literal["train", "reduce", "hold", "defer"]
"""What to do now: with all workers, with fewer, with none and go on later, or not begin yet."""

_SHOWN_WINDOWS = 3
_MOST_S = 10 * 366 * 86400.0
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def read_deadline(text: str, *, now: float) -> float:
    """Seconds since the epoch of `96h`, `4d`, `90m` from now, or of a time; raises InvalidArgument if it is past."""
    span = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    found = now + float(span[1]) * _UNITS_S[span[2]] if span else read_time(text)
    if found <= now:
        raise InvalidArgument("the deadline is in the past", hint="give one ahead, such as 96h", got=text[:60])
    if found > now + _MOST_S:
        raise InvalidArgument("the deadline is more than ten years ahead", hint="give one such as 96h", got=text[:60])
    return found


def action_now(plan: WorkerSchedule, *, max_workers: int, has_begun: bool) -> ScheduleAction:
    """What a plan says about its first slot."""
    workers = plan.slots[0].workers if plan.slots else 0
    if workers >= max_workers:
        return "train"
    if workers:
        return "reduce"
    return "hold" if has_begun else "defer"


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The answer of `torsh green when`."""

    action: ScheduleAction
    plan: WorkerSchedule
    now: WorkerSchedule
    current: Intensity
    known_until: float
    until: float
    num_absurd: int = 0
    """Values of the feed that cannot be true: they are left out."""
    ahead: Sequence[TimeSlot] = ()
    """All of the time until the deadline."""
    renewable_above: float = 0.4
    """Stretches with a larger renewable share are told too, whatever the plan is."""

    @property
    def saved_grams(self) -> float:
        """Against running now with all workers."""
        return self.now.grams - self.plan.grams

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "action": self.action,
            "windows": [self._window(start, end, workers) for start, end, workers in self.plan.windows],
            "renewable_windows": self._renewable_windows(),
            "grams": self.plan.grams,
            "grams_now": self.now.grams,
            "saved_grams": self.saved_grams,
            "saved_share": self.saved_grams / self.now.grams if self.now.grams > 0 else 0.0,
            "kwh": self.plan.kwh,
            "done_at": _clock(self.plan.done_at),
            "deadline": _clock(self.until),
            "g_per_kwh_now": self.current.g_per_kwh,
            "renewable_share_now": self.current.renewable_share,
            "source": self.current.source,
            "zone": self.current.zone,
            "signal": self.current.signal,
            "forecast_until": _clock(self.known_until),
            "num_absurd": self.num_absurd,
        }

    def _window(self, start: float, end: float, workers: int) -> dict[str, Any]:
        slots = [one.slot for one in self.plan.slots if start <= one.slot.start < end]
        return {**_stretch(slots, start, end), "workers": workers}

    def _renewable_windows(self) -> list[dict[str, Any]]:
        """The stretches with much renewable power, the one with the largest share first."""
        stretches = [list(slots) for is_much, slots in groupby(self.ahead, self._is_renewable) if is_much]
        found = [_stretch(slots, slots[0].start, slots[-1].end) for slots in stretches]
        return sorted(found, key=lambda row: -row["renewable_share"])

    def _is_renewable(self, slot: TimeSlot) -> bool:
        return slot.renewable_share is not None and slot.renewable_share > self.renewable_above

    def in_words(self) -> str:
        """For people."""
        told = self.to_dict()
        lines = [
            (
                f"now: {self.action}; {self.current.g_per_kwh:.0f} g/kWh, {self.current.signal}, {self.current.basis}, "
                f"zone {self.current.zone}, by {self.current.source}"
            )
        ]
        lines += [
            f"train from {row['start']} to {row['end']} with {_workers(row['workers'])}, {row['g_per_kwh']:.0f} g/kWh"
            + ("" if row["renewable_share"] is None else f", {row['renewable_share']:.0%} renewable")
            for row in told["windows"]
        ]
        lines += [
            f"{row['renewable_share']:.0%} renewable from {row['start']} to {row['end']}, {row['g_per_kwh']:.0f} g/kWh"
            for row in told["renewable_windows"][:_SHOWN_WINDOWS]
        ]
        lines.append(
            f"{self.plan.grams / 1e3:.3g} kg CO2, done at {told['done_at']}; run now: {self.now.grams / 1e3:.3g} kg; "
            f"saves {told['saved_share']:.0%}"
        )
        if self.known_until < self.until - 1:
            lines.append(
                f"the feed forecasts until {told['forecast_until']}; then the same hour of the day before stands in"
            )
        if self.num_absurd:
            lines.append(f"values of the feed that cannot be true and are left out: {self.num_absurd}")
        return "\n".join(lines)


def recommend(job: JobShape, feed: CarbonFeed, *, now: float, until: float, renewable_above: float = 0.4) -> RunTimes:
    """The plan with the least CO2 that is done by `until`; raises InvalidArgument if none is, CommunicationError if
    the feed does not answer."""
    try:
        series = series_of(feed, now)
    except OSError as error:
        if isinstance(error, TorshError):
            raise
        raise CommunicationError(
            first_line(error), hint="try again later, or give a forecast of your own with --file: time,g_per_kwh"
        ) from error
    current = series.at(now)
    if current is None:
        absurd = f"; left out as impossible: {series.num_absurd}" if series.num_absurd else ""
        raise InvalidArgument(
            f"the feed has no intensity for now; it has {series.span()}{absurd}",
            hint="is the file or the feed up to date?",
        )
    slots, known_until = slots_ahead(series, now=now, until=until)
    at_once = run_now(job, slots)
    if at_once.done_at is None:
        need_h = job.work_h / job.speeds[-1]
        raise InvalidArgument(
            f"the job takes {need_h:.1f} h with {_workers(job.max_workers)} and the deadline is in "
            f"{(until - now) / 3600:.1f} h",
            hint="give a later deadline or more workers",
        )
    plan = min(allocate(job, slots), at_once, key=lambda one: one.grams)
    action = action_now(plan, max_workers=job.max_workers, has_begun=False)
    return RunTimes(
        action=action,
        plan=plan,
        now=at_once,
        current=current,
        known_until=known_until,
        until=until,
        num_absurd=series.num_absurd,
        ahead=slots,
        renewable_above=renewable_above,
    )


def _stretch(slots: Sequence[TimeSlot], start: float, end: float) -> dict[str, Any]:
    """A stretch of time as a row, with the grid's means over it."""
    hours = sum(slot.hours for slot in slots)
    shares = [slot.renewable_share * slot.hours for slot in slots if slot.renewable_share is not None]
    return {
        "start": _clock(start),
        "end": _clock(end),
        "hours": (end - start) / 3600,
        "g_per_kwh": sum(slot.g_per_kwh * slot.hours for slot in slots) / hours,
        "renewable_share": sum(shares) / hours if len(shares) == len(slots) else None,
    }


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def _clock(time: float | None) -> str | None:
    return None if time is None else show_time(time)
