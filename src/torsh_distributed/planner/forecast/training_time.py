"""How long a training takes and what it costs, from a predicted step and numbers of the user's. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torsh_distributed.errors import InvalidArgument

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """How often devices fail and what a failure costs; all of it the user's, measured on the cluster in question."""

    device_mtbf_s: float
    """Mean time between failures of one device, with its share of the node."""
    recovery_s: float
    """From a failure to the first step after it."""
    save_s: float
    """What a checkpoint holds training up for."""
    save_every_s: float | None = None
    """Time between checkpoints; None: the best one."""

    def job_mtbf_s(self, num_devices: int) -> float:
        """Mean time between failures of a job: any device ends it."""
        return self.device_mtbf_s / num_devices

    def period_s(self, num_devices: int) -> float:
        """The time between checkpoints: as given, or that which loses the least to saving and to steps done again."""
        if self.save_every_s is not None:
            return self.save_every_s
        return math.sqrt(2 * self.save_s * self.job_mtbf_s(num_devices))

    def goodput(self, num_devices: int) -> float:
        """The share of the time in which a job makes progress that it keeps.

        Failures come at any time, also during a recovery, and lose what was done since the last whole checkpoint. The
        expected number of whole periods between two of them is a geometric sum.
        """
        period, mtbf = self.period_s(num_devices), self.job_mtbf_s(num_devices)
        per_failure = math.exp(-self.recovery_s / mtbf) / math.expm1(min(700.0, (period + self.save_s) / mtbf))
        return per_failure * period / mtbf


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """A training of some tokens with one plan: an estimate from a predicted step."""

    num_devices: int
    step_s: float
    tokens_per_step: float
    tokens: float
    goodput: float = 1.0
    price_per_hour: float | None = None
    """Of one device, as the user says; there is no list of prices here."""
    interval: tuple[float, float] | None = None
    """Between which multiples of the step 90 % of past runs are, which is what hours and cost are multiplied with as
    well; None before there are enough."""

    @property
    def tokens_per_s(self) -> float:
        """While it trains."""
        return self.tokens_per_step / self.step_s

    @property
    def num_steps(self) -> int:
        """Optimizer updates."""
        return math.ceil(self.tokens / self.tokens_per_step)

    @property
    def total_s(self) -> float:
        """From beginning to end, with what failures take."""
        return self.num_steps * self.step_s / self.goodput

    def is_done_by(self, limit_s: float) -> tuple[bool, bool]:
        """Whether it ends in time as predicted, and whether it does as slowly as the interval allows."""
        slowest = self.interval[1] if self.interval is not None else 1.0
        return self.total_s <= limit_s, self.total_s * slowest <= limit_s

    @property
    def device_hours(self) -> float:
        """What is paid for."""
        return self.total_s / HOUR_S * self.num_devices

    @property
    def cost(self) -> float | None:
        """In the currency of the price."""
        return None if self.price_per_hour is None else self.device_hours * self.price_per_hour


_UNITS_S = {"s": 1.0, "min": 60.0, "m": 60.0, "h": HOUR_S, "d": 24 * HOUR_S, "w": 7 * 24 * HOUR_S}


def seconds_of(text: str) -> float:
    """The seconds of a time such as 30d, 12h, 90min or 45s."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = text.strip()[len(number) :].strip()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if value <= 0 or unit not in _UNITS_S or not math.isfinite(value):
        raise InvalidArgument(f"{text} is not a time", hint="such as 30d, 12h, 90min or 45s")
    return value * _UNITS_S[unit]


_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def count_of(text: str) -> float:
    """A number of tokens such as 1.5T, 300B or 20000000."""
    stripped = text.strip().upper()
    number = stripped.rstrip("KMBT")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    unit = stripped[len(number) :]
    if value <= 0 or unit not in _COUNTS or not math.isfinite(value):
        raise InvalidArgument(f"{text} is not a number of tokens", hint="such as 1.5T, 300B or 20000000")
    return value * _COUNTS[unit]
