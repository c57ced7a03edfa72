"""The harness: real work is timed, ratios follow from the numbers, better is above one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import QUICK, Budget, Measurement, Row, Unit, compare
from benchmarks.wording import quantity, ratio, tick

POSITIVE = st.floats(1e-9, 1e9)


def exactly(value: float) -> Measurement:
    return Measurement(median=value, low=value, high=value, num_samples=1)


@given(POSITIVE, POSITIVE, st.sampled_from(Unit))
def test_a_ratio_above_one_means_that_ours_is_better(ours: float, theirs: float, unit: Unit) -> None:
    row = Row(name="row", unit=unit, ours=exactly(ours), rivals={"rival": exactly(theirs)})
    is_better = ours < theirs if unit.is_lower_better else ours > theirs
    assert (row.ratios["rival"] > 1) == is_better
    assert row.ratios["rival"] == pytest.approx(theirs / ours if unit.is_lower_better else ours / theirs)


def test_a_value_of_nothing_has_no_ratio() -> None:
    row = Row(name="row", unit=Unit.BYTES, ours=exactly(0.0), rivals={"rival": exactly(1.0)})
    assert row.ratios == {}
    assert ratio(row, "rival") == ""


@given(st.lists(POSITIVE, min_size=1))
def test_the_median_lies_between_the_percentiles(samples: list[float]) -> None:
    measured = Measurement.of(samples)
    assert min(samples) <= measured.low <= measured.median <= measured.high <= max(samples)
    assert measured.num_samples == len(samples)


def test_a_slower_workload_measures_slower() -> None:
    row = compare("sleep", lambda: time.sleep(0.001), {"longer": lambda: time.sleep(0.02)}, budget=QUICK)
    assert row.ours.median >= 0.001
    assert row.rivals["longer"].median >= 0.02
    assert row.ratios["longer"] == row.rivals["longer"].median / row.ours.median
    assert row.ours.num_samples == QUICK.num_samples


def test_an_amount_divides_times_and_multiplies_rates() -> None:
    def work() -> None:
        time.sleep(0.01)

    assert compare("each", work, {}, budget=QUICK, amount=10).ours.median >= 0.001
    assert compare("rate", work, {}, budget=QUICK, amount=10, unit=Unit.PER_SECOND).ours.median <= 1000


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    budget = Budget(name="turns", num_samples=3, sample_s=0.0)
    compare("turns", lambda: calls.append("ours"), {"rival": lambda: calls.append("rival")}, budget=budget)
    assert calls == ["ours", "rival"] * 4  # one round to warm up, three samples


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (4.2e-6, Unit.SECONDS, "4.20 µs"),
        (0.0123, Unit.SECONDS, "12.3 ms"),
        (0.99999, Unit.SECONDS, "1.00 s"),
        (3e-10, Unit.SECONDS, "0.30 ns"),
        (28_700, Unit.PER_SECOND, "28.7 k/s"),
        (5.1e9, Unit.BYTES_PER_SECOND, "5.10 GB/s"),
        (512, Unit.BYTES, "512 B"),
        (0.0, Unit.BYTES, "0.00 B"),
    ],
)
def test_numbers_are_written_with_three_digits_and_a_prefix(value: float, unit: Unit, text: str) -> None:
    assert quantity(value, unit) == text


def test_ticks_are_round() -> None:
    assert [tick(value, Unit.SECONDS) for value in (0, 1e-5, 0.1, 2)] == ["0", "10 µs", "100 ms", "2 s"]
