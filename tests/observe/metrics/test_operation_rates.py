"""Latency, throughput and trend of what repeats, from events whose numbers are known."""

from __future__ import annotations

import pytest

from tests.observe.packets import FakeRank
from torsh_distributed import events
from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.metrics.operation_rates import RateWindow
from torsh_distributed.observe.metrics.rank_collector import RankCollector


def test_a_window_knows_its_rate_and_where_it_goes() -> None:
    window = RateWindow(size=40)
    assert (window.rate, window.trend) == (None, None)
    for _ in range(100):
        window.add(1e6, 10.0)  # long gone
    for seconds in [1.0] * 20 + [2.0] * 20:
        window.add(100, seconds)
    assert window.rate == pytest.approx(4000 / 60)
    assert window.trend == pytest.approx(-0.5)
    idle = RateWindow()
    for _ in range(30):
        idle.add(5, 0.0)
    assert (idle.rate, idle.trend) == (None, None)


def test_codecs_are_told_apart_by_name_and_measured() -> None:
    rank = FakeRank(0)
    told = {"step": 1, "index": 0, "num_bytes": 1000}
    for number in range(40):
        duration_s = 0.01 if number < 20 else 0.02
        slow = events.BucketEvent(**told, duration_s=duration_s, codec=f"topk:0.0{number + 1}", wire_bytes=100)
        plain = events.BucketEvent(**told, duration_s=0.5)
        whole = events.BucketEvent(**told, duration_s=0.1, codec="none", wire_bytes=2000)
        for event in (slow, plain, whole):
            rank.collector.take(event, now_s=100.0)
    rank.collector.settle()
    metrics = rank.collector.metrics
    assert metrics("torsh_compression_bytes_per_second", "topk").value == pytest.approx(40_000 / 0.6)
    assert metrics("torsh_compression_trend_ratio", "topk").value == pytest.approx(-0.5)
    assert metrics("torsh_compression_size_ratio", "topk").value == pytest.approx(0.1)
    assert metrics("torsh_compression_size_ratio", "none").value == pytest.approx(2.0)
    statistics = metrics("torsh_compression_seconds", "topk").statistics()
    assert statistics is not None
    assert (statistics.num_samples, statistics.high) == (40, 0.02)
    view = JobView()
    view.take(rank.packet())
    shown = {row["what"]: row for row in page_state(view)["rates"]}
    assert set(shown) == {"codec none", "codec topk"}
    assert shown["codec topk"]["p99_s"] == pytest.approx(0.02)
    assert shown["codec topk"]["trend"] == pytest.approx(-0.5)
    assert shown["codec topk"]["bytes_per_s"] == pytest.approx(66666.7)


def test_gates_have_latency_throughput_and_the_course_of_their_load() -> None:
    rank = FakeRank(0)
    for number in range(40):
        routed = {"num_tokens": 100, "num_routed": 190, "num_dropped": 10, "load": (90, 100), "gate_entropy": 0.5}
        variation, duration_s = (0.2, 0.001) if number < 20 else (0.1, 0.0005)
        told = {"load_variation": variation, "capacity_use": 0.75, "duration_s": duration_s}
        rank.collector.take(events.RoutingEvent(**routed, **told), now_s=100.0)
    rank.collector.settle()
    metrics = rank.collector.metrics
    for name, value in (
        ("routed_tokens", 4000),
        ("expert_choices", 7600),
        ("expert_dropped", 400),
        ("expert_capacity_use_ratio", 0.75),
        ("routing_tokens_per_second", 4000 / 0.03),
        ("routing_trend_ratio", 1.0),
        ("expert_load_trend_ratio", -0.5),
    ):
        assert metrics(f"torsh_{name}").value == pytest.approx(value), name
    statistics = metrics("torsh_routing_seconds").statistics()
    assert statistics is not None
    assert (statistics.mean, statistics.p99) == (pytest.approx(0.00075), pytest.approx(0.001))


def test_operations_count_for_the_axis_of_their_group_once_axes_are_known() -> None:
    collector = RankCollector().attach()
    try:
        with events.waiting("all_reduce", "early", num_started=1, num_bytes=1):
            pass
        collector.fold()
        collector.note_axes({"a": "tp", "b": "dp"}.get)
        for group in ("a", "a", "b", "other"):
            record = recorder.begin("all_reduce", group, 1000)
            with events.waiting("all_reduce", group, num_started=1, num_bytes=1000):
                pass
            recorder.end(record)
    finally:
        collector.detach()
    collector.fold()
    values = collector.metrics.values()
    assert values['torsh_axis_operations{axis="tp"}'] == 2
    assert values['torsh_axis_bytes{axis="dp"}'] == 1000
    assert values['torsh_axis_wait_seconds{axis="tp"}'] > 0  # type: ignore[operator]  # None fails too
    assert (values['torsh_axis_bytes_per_second{axis="tp"}'] or 0) > 0
    statistics = collector.metrics("torsh_axis_seconds", "tp").statistics()
    assert statistics is not None
    assert statistics.num_samples == 2
    assert {name for name in values if name.startswith("torsh_axis_operations")} == {
        'torsh_axis_operations{axis="tp"}',
        'torsh_axis_operations{axis="dp"}',
    }
