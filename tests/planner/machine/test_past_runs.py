"""What past runs say: factors by part, and an interval that holds for runs that were not asked."""

from __future__ import annotations

import math
import random

import pytest

from torsh_distributed.planner.machine.past_runs import PARTS, PastRun, PastRuns, corrected_s, parts_of

PREDICTED = {"compute": 2.0, "wait": 1.0, "optimizer": 0.5, "bubble": 0.0}


def run(num_ranks: int = 2, **ratios: float) -> PastRun:
    measured = {part: PREDICTED[part] * ratios.get(part, 1.0) for part in PARTS}
    return PastRun(date="2026-11-18", what="M", num_ranks=num_ranks, predicted_s=PREDICTED, measured_s=measured)


def test_before_any_run_nothing_is_corrected_and_there_is_no_interval() -> None:
    assert PastRuns().factors(2) == {}
    assert PastRuns().interval(2) is None
    assert corrected_s(PREDICTED, {}) == 3.5


def test_a_part_is_corrected_by_the_median_of_its_ratios_and_one_that_took_no_time_by_none() -> None:
    past = PastRuns((run(compute=1.2), run(compute=1.4, wait=3.0), run(compute=9.0, wait=3.0)))
    assert past.factors(2) == pytest.approx({"compute": 1.4, "wait": 3.0, "optimizer": 1.0})
    assert corrected_s(PREDICTED, past.factors(2)) == pytest.approx(2 * 1.4 + 3.0 + 0.5)


def test_runs_on_as_many_ranks_count_and_others_only_where_there_are_none() -> None:
    past = PastRuns((run(1, compute=1.1), run(4, compute=5.0)))
    assert past.factors(1)["compute"] == pytest.approx(1.1)
    assert past.factors(8)["compute"] == pytest.approx((1.1 + 5.0) / 2)


def test_two_runs_are_too_few_for_an_interval_and_equal_ones_make_it_narrow() -> None:
    assert PastRuns((run(), run())).interval(2) is None
    low, high = PastRuns((run(compute=2.0),) * 3).interval(2) or (0.0, 0.0)
    assert (low, high) == pytest.approx((1.0, 1.0))


def test_terms_are_added_up_by_the_part_that_they_are_seen_in() -> None:
    found = parts_of({"forward": 1.0, "backward": 2.0, "averaging": 0.5, "update": 0.25})
    assert found == {"compute": 3.0, "wait": 0.5, "optimizer": 0.25, "bubble": 0.0}


@pytest.mark.parametrize("num_runs", [4, 8, 20])
def test_nine_of_ten_runs_that_were_held_out_are_in_the_interval(num_runs: int) -> None:
    source = random.Random(num_runs)
    inside = total = 0
    for _ in range(400):
        *known, held_out = (run(compute=math.exp(source.gauss(0.1, 0.15))) for _ in range(num_runs + 1))
        past = PastRuns(tuple(known))
        low, high = past.interval(2) or (0.0, 0.0)
        ratio = held_out.total_s / corrected_s(PREDICTED, past.factors(2))
        inside += low <= ratio <= high
        total += 1
    assert 0.85 <= inside / total <= 0.95
