"""Spans into parts: every moment is counted once, whatever lies inside what."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.train.efficiency.meter import Account
from torsh_distributed.train.efficiency.report import EfficiencyReport, StepTimes


def test_what_lies_inside_a_phase_is_not_counted_in_it() -> None:
    account = Account(0.0)
    account.add_phase("data", 0.0, 1.0)
    account.add_wait("tp", 2.0, 1.5)
    account.count("tp", num_operations=1, num_bytes=100)
    account.add_phase("forward", 1.0, 4.0)
    account.add_wait("dp", 6.0, 1.0)
    account.add_phase("backward", 5.0, 3.0)
    account.add_wait("dp", 8.0, 0.5)
    account.add_phase("optimizer", 9.0, 2.0)
    account.end_step(12.0)
    times = account.times(("dp", "tp"))
    assert times.parts == {
        "compute": pytest.approx(2.5 + 2.0),
        "waiting for dp": pytest.approx(1.5),
        "waiting for tp": pytest.approx(1.5),
        "pipeline bubble": 0,
        "optimizer": pytest.approx(2.0),
        "data": pytest.approx(1.0),
        "other": pytest.approx(0.5 + 1.0),
    }
    assert times.axes["tp"].num_bytes == 100
    assert times.efficiency == pytest.approx(6.5 / 12)


def test_waiting_for_another_stage_is_bubble_and_waiting_inside_a_stage_is_not() -> None:
    account = Account(0.0)
    account.add_wait("pp", 0.5, 1.0)
    account.add_wait("tp", 2.5, 0.5)
    account.add_phase("stage", 2.0, 2.0)
    account.add_wait("pp", 4.0, 3.0)
    account.add_phase("schedule", 0.0, 8.0)
    account.add_wait("pp", 8.0, 0.25)
    account.add_phase("forward", 0.0, 9.0)
    account.end_step(9.0)
    times = account.times(("pp", "tp"))
    assert times.bubble_s == pytest.approx(6.0)
    assert times.compute_s == pytest.approx(1.5 + 0.75)
    assert times.axes["tp"].wait_s == pytest.approx(0.5)
    assert times.axes["pp"].wait_s == pytest.approx(0.25), "what comes after the schedule is the axis's own"


def test_what_began_before_the_measuring_counts_from_there_on() -> None:
    account = Account(10.0)
    account.add_phase("forward", 4.0, 8.0)
    account.end_step(13.0)
    times = account.times(())
    assert (times.compute_s, times.other_s, times.step_s) == (2.0, 1.0, 3.0)


@st.composite
def nested_spans(draw: st.DrawFn) -> list[tuple[str, float, float]]:
    """Spans of one thread in the order in which they end: cut points, and pairs that do not cross."""
    spans: list[tuple[str, float, float]] = []

    def fill(start: float, end: float, depth: int) -> None:
        cuts = sorted(draw(st.lists(st.floats(start, end), max_size=4)))
        for left, right in pairwise(cuts):
            if depth < 3 and draw(st.booleans()):
                fill(left, right, depth + 1)
                kind = draw(st.sampled_from(["forward", "schedule", "stage", "optimizer", "data", "dp", "pp"]))
                spans.append((kind, left, right))

    fill(0.0, 100.0, 0)
    return spans


@given(st.lists(nested_spans(), min_size=1, max_size=3))
def test_the_parts_add_up_to_the_step(steps: list[list[tuple[str, float, float]]]) -> None:
    account = Account(0.0)
    for number, spans in enumerate(steps):
        for kind, start, end in spans:
            if kind in ("dp", "pp"):
                account.add_wait(kind, number * 100 + start, end - start)
            else:
                account.add_phase(kind, number * 100 + start, end - start)  # type: ignore[arg-type]
        account.end_step((number + 1) * 100.0)
    times = account.times(("dp", "pp"))
    assert times.step_s == pytest.approx(100)
    assert sum(times.parts.values()) == pytest.approx(100)
    assert min(times.parts.values()) >= -1e-6


def test_the_mean_over_ranks_and_what_stands_out() -> None:
    def rank(wait: float) -> StepTimes:
        account = Account(0.0)
        account.add_wait("tp", 1.0, wait)
        account.count("tp", num_operations=3, num_bytes=2**21)
        account.add_phase("forward", 0.0, 8.0)
        account.end_step(10.0)
        return account.times(("dp", "tp"))

    report = EfficiencyReport(num_steps=1, equation="dp 2 × tp 2 = 4", ranks=(rank(2.0), rank(6.0)))
    assert report.mean.axes["tp"].wait_s == pytest.approx(4.0)
    assert report.efficiency == pytest.approx((6 + 2) / 20)
    assert any("40% of a step is waiting for communication, most of it along tp" in text for text in report.findings())
    assert report.to_dict()["mean"]["axes"]["tp"]["num_bytes"] == 2**21
    assert StepTimes.from_dict(report.to_dict()["ranks"][1]) == report.ranks[1]
