"""Failures drawn over the time of a job: how often it is held up, and what is left of the time for steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.planner.forecast.training_time import FailureRates

_MOST_FAILURES = 10_000_000
"""In all draws: some hundred megabytes."""


@dataclass(frozen=True)
class SimulatedFailures:
    """What failures did to some drawn jobs of the same length, an entry for each."""

    num_failures: np.ndarray
    goodput: np.ndarray
    """The share of the time that was spent on steps which were kept."""
    lost_to: dict[str, float]
    """Cause to the share of all jobs' time."""

    @staticmethod
    def range_of(values: np.ndarray) -> tuple[float, float]:
        """Between which values nine of ten jobs are."""
        low, high = np.quantile(values, (0.05, 0.95))
        return float(low), float(high)


def simulate_failures(
    rates: FailureRates, num_devices: int, *, duration_s: float, num_draws: int = 1000, seed: int = 0
) -> SimulatedFailures:
    """Draw jobs of some length on so many devices, any of which ends the job's steps until it has recovered.

    Times between failures of a device are exponential, so those of the job are too. A failure loses what was done since
    the last whole checkpoint; another one may come while the job recovers. The same `seed` draws the same failures.
    """
    mtbf_s, period_s = rates.job_mtbf_s(num_devices), rates.period_s(num_devices)
    expected = duration_s / mtbf_s
    columns = math.ceil(expected + 10 * math.sqrt(expected) + 20)
    if columns * num_draws > _MOST_FAILURES:
        raise InvalidArgument(
            f"a job of {num_devices} devices fails every {mtbf_s:.3g} s, {expected:,.0f} times in all",
            hint="draw a shorter time, or say how long one device, not the job, runs between failures",
        )
    between = np.random.default_rng(seed).exponential(mtbf_s, (num_draws, columns))
    starts = np.cumsum(between, axis=1) - between
    lasting = np.clip(duration_s - starts, 0.0, between)
    is_cut = lasting < between  # by the end of the job, not by a failure
    recovering = np.minimum(lasting, np.where(np.arange(columns) > 0, rates.recovery_s, 0.0))
    training = lasting - recovering
    cycle_s = period_s + rates.save_s
    saves = np.floor(training / cycle_s)
    rest = training - saves * cycle_s
    # What the end of the job finds done counts: it is saved then.
    kept = saves * period_s + np.where(is_cut, np.minimum(rest, period_s), 0.0)
    saving = saves * rates.save_s + np.where(is_cut, np.maximum(0.0, rest - period_s), 0.0)
    total = duration_s * num_draws
    lost = {"recovering": recovering, "steps done again": training - kept - saving, "saving": saving}
    return SimulatedFailures(
        num_failures=((lasting > 0) & ~is_cut).sum(axis=1),
        goodput=kept.sum(axis=1) / duration_s,
        lost_to={name: float(seconds.sum()) / total for name, seconds in lost.items()},
    )
