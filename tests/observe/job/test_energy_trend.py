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
