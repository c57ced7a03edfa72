"""Time, cost and goodput against arithmetic by hand."""

from __future__ import annotations

import math

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.planner.forecast.training_time import FailureRates, TrainingTime, count_of, seconds_of


def test_time_and_cost_are_those_by_hand() -> None:
    found = TrainingTime(num_devices=8, step_s=2.0, tokens_per_step=1e6, tokens=3.6e9, goodput=0.5, price_per_hour=3.0)
    assert found.num_steps == 3600
    assert found.total_s == 3600 * 2.0 / 0.5
    assert found.device_hours == pytest.approx(4 * 8)
    assert found.cost == pytest.approx(96.0)


def test_no_other_checkpoint_period_has_a_better_goodput_than_the_chosen_one() -> None:
    def goodput(period_s: float | None) -> float:
        rates = FailureRates(device_mtbf_s=1e7, recovery_s=300, save_s=20, save_every_s=period_s)
        return rates.goodput(1000)

    best = math.sqrt(2 * 20 * 1e7 / 1000)
    assert goodput(None) == pytest.approx(goodput(best))
    assert all(goodput(None) >= goodput(best * factor) for factor in (0.3, 0.9, 1.1, 3.0))
    # Of 10,000 s between failures: 632 s between saves, so 16 × 20 s saving, half a period and 300 s lost.
    assert 1 / goodput(None) == pytest.approx(1 + 20 / best + (best / 2 + 300) / 1e4, rel=0.006)


def test_failures_without_end_leave_nothing_and_none_leave_all_but_the_saving() -> None:
    def goodput(mtbf_s: float) -> float:
        return FailureRates(device_mtbf_s=mtbf_s, recovery_s=300, save_s=20, save_every_s=180).goodput(1)

    assert goodput(0.1) == pytest.approx(0.0)
    assert goodput(1e12) == pytest.approx(0.9)


@pytest.mark.parametrize(("text", "seconds"), [("30d", 2592000), ("12h", 43200), ("1.5min", 90), ("45s", 45)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-3h", "3 years", "nan", "1e999s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a time"):
        seconds_of(text)


def test_tokens_are_read_or_refused() -> None:
    assert (count_of("1.5T"), count_of("300b"), count_of("2e6")) == (1.5e12, 3e11, 2e6)
    with pytest.raises(InvalidArgument, match="not a number of tokens"):
        count_of("many")
