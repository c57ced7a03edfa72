from __future__ import annotations

import pytest

from torsh_distributed.observe.job.energy_trend import MAX_SPANS, EnergyTrend


def test_a_day_of_seconds_becomes_some_dozens_of_spans_that_lose_no_joule() -> None:
    trend = EnergyTrend()
    for second in range(86_400):
        trend.add(second + 1.0, 1.0, 100.0, g_per_kwh=360.0 if second < 43_200 else None, renewable_share=0.5)
    spans = trend.spans
    assert MAX_SPANS / 2 <= len(spans) <= MAX_SPANS
    assert sum(span.joules for span in spans) == pytest.approx(8.64e6)
    assert sum(span.grams for span in spans) == pytest.approx(432.0)
    assert (spans[0].begin, spans[-1].end) == (0.0, 86_400.0)
    assert spans[0].mean_w == pytest.approx(100.0)
    assert (spans[0].g_per_kwh, spans[-1].g_per_kwh) == (pytest.approx(360.0), None)
    assert spans[3].renewable_share == pytest.approx(0.5)


def test_samples_are_in_the_span_in_which_their_step_ended_and_stay_there_as_spans_widen() -> None:
    trend = EnergyTrend()
    for second in range(400):
        trend.add(second + 1.0, 1.0, 10.0, g_per_kwh=None, renewable_share=None)
        trend.add_samples(second + 1.0, 5 if second < 200 else 20)
    spans = trend.spans
    assert sum(span.samples for span in spans) == 200 * 25
    assert spans[0].samples_per_joule == pytest.approx(0.5, rel=0.3)
    assert spans[-1].samples_per_joule == pytest.approx(2.0, rel=0.3)
