"""Drawn failures against what follows from their distribution, and against arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.planner.forecast.simulated_failures import simulate_failures
from torsh_distributed.planner.forecast.training_time import HOUR_S, FailureRates


def rates(mtbf_s: float, period_s: float = 300.0) -> FailureRates:
    return FailureRates(device_mtbf_s=mtbf_s, recovery_s=600.0, save_s=20.0, save_every_s=period_s)


def test_without_failures_only_saving_takes_time() -> None:
    found = simulate_failures(rates(1e15), 8, duration_s=3200.0, num_draws=3)
    assert found.num_failures.tolist() == [0, 0, 0]
    assert found.goodput == pytest.approx([300 / 320] * 3)
    assert found.lost_to == pytest.approx({"recovering": 0.0, "steps done again": 0.0, "saving": 20 / 320})


@pytest.mark.parametrize("mtbf_h", [0.5, 2.0, 24.0])
def test_drawn_jobs_have_the_predicted_goodput_and_number_of_failures(mtbf_h: float) -> None:
    given, duration_s = rates(100 * mtbf_h * HOUR_S), 60 * 24 * HOUR_S
    found = simulate_failures(given, 100, duration_s=duration_s, num_draws=400)
    assert found.goodput.mean() == pytest.approx(given.goodput(100), rel=0.01)
    assert found.num_failures.mean() == pytest.approx(duration_s / (mtbf_h * HOUR_S), rel=0.02)
    assert found.goodput.mean() + sum(found.lost_to.values()) == pytest.approx(1.0)
    low, high = found.range_of(found.num_failures)
    assert np.mean((found.num_failures >= low) & (found.num_failures <= high)) == pytest.approx(0.9, abs=0.05)


def test_the_same_seed_draws_the_same_failures() -> None:
    first, again, other = (simulate_failures(rates(1e5), 8, duration_s=1e6, num_draws=5, seed=one) for one in (1, 1, 2))
    assert first.goodput.tolist() == again.goodput.tolist() != other.goodput.tolist()


def test_a_job_that_only_fails_is_refused_in_words() -> None:
    with pytest.raises(InvalidArgument, match=r"fails every 0\.01 s"):
        simulate_failures(rates(1.0), 100, duration_s=1e6)


def test_a_failure_during_recovery_costs_what_was_recovered() -> None:
    # Less than one recovery between failures: next to nothing is done.
    found = simulate_failures(rates(60.0), 1, duration_s=1e6, num_draws=20)
    done = 300 * math.exp(-600 / 60) / (60 * math.expm1(320 / 60))
    assert found.goodput.mean() == pytest.approx(done, abs=1e-4)
    assert found.lost_to["recovering"] > 0.9
