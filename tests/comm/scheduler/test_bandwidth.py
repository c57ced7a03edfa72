"""The bandwidth monitor: unknown until measured, overlaps once, a window that slides."""

from __future__ import annotations

import pytest

from torsh_distributed.comm.scheduler.bandwidth import BandwidthMonitor


def monitor(now_s: float, **options: float) -> BandwidthMonitor:
    return BandwidthMonitor(clock=lambda: now_s, **options)


def test_it_is_unknown_until_something_travelled() -> None:
    empty = monitor(0.0)
    assert empty.measured() is None
    empty.add(0, 0.0, 1.0)
    assert empty.measured() is None, "an empty message says nothing about bandwidth"


def test_time_shared_by_transfers_counts_once_and_idle_time_not_at_all() -> None:
    measured = monitor(20.0, window_s=30.0)
    measured.add(100, 0.0, 2.0)
    measured.add(100, 1.0, 2.0)
    measured.add(100, 9.0, 10.0)
    found = measured.measured()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(300 / 3)
    assert found.shortest_s == 1.0


def test_only_the_window_counts() -> None:
    measured = monitor(100.0, window_s=10.0)
    measured.add(1_000_000, 0.0, 1.0)
    assert measured.measured() is None
    measured.add(10, 98.0, 99.0)
    found = measured.measured()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(10)


def test_memory_is_bounded() -> None:
    measured = monitor(10_000.0, window_s=1e9)
    for number in range(3000):
        measured.add(1, float(number), number + 0.5)
    assert len(measured._transfers) == 1000


def test_an_estimate_is_never_below_the_shortest_transfer() -> None:
    measured = monitor(1.0)
    measured.add(1000, 0.0, 1.0)
    found = measured.measured()
    assert found is not None
    assert found.estimated_s(10_000) == pytest.approx(10.0)
    assert found.estimated_s(1) == pytest.approx(1.0)
