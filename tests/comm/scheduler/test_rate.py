"""The token bucket holds its limit, and no more than its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.scheduler.rate import BandwidthMonitor, TokenBucket
from torsh_distributed.errors import InvalidArgument


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(
    rate=st.floats(min_value=1, max_value=1e6),
    burst=st.floats(min_value=1, max_value=1e6),
    steps=st.lists(st.tuples(st.integers(0, 10**6), st.floats(min_value=0, max_value=10)), max_size=50),
)
def test_never_more_than_the_limit_goes_out(rate: float, burst: float, steps: list[tuple[int, float]]) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock=clock)
    taken = 0
    for num_bytes, idle_s in steps:
        clock.now_s += idle_s
        delay_s = bucket.delay_s(num_bytes)
        clock.now_s += delay_s
        bucket.take(num_bytes)
        taken += num_bytes
        allowed = burst + rate * clock.now_s + max(0.0, num_bytes - burst)
        assert taken <= allowed * (1 + 1e-9) + 1e-3


@given(rate=st.floats(min_value=1, max_value=1e6), sizes=st.lists(st.integers(1, 10**5), min_size=1, max_size=50))
def test_the_limit_is_used_up(rate: float, sizes: list[int]) -> None:
    """What is always ready to go waits no longer than the limit asks for."""
    clock = Clock()
    bucket = TokenBucket(rate, clock=clock)
    for num_bytes in sizes:
        clock.now_s += bucket.delay_s(num_bytes)
        bucket.take(num_bytes)
    assert clock.now_s <= sum(sizes) / rate * (1 + 1e-9) + 1e-6


def test_a_burst_goes_at_once_and_the_rest_waits() -> None:
    clock = Clock()
    bucket = TokenBucket(100, 50, clock=clock)
    assert bucket.delay_s(50) == 0.0
    bucket.take(50)
    assert bucket.delay_s(10) == pytest.approx(0.1)
    clock.now_s = 0.1
    assert bucket.delay_s(10) == pytest.approx(0.0)


def test_what_exceeds_the_bucket_leaves_a_debt() -> None:
    clock = Clock()
    bucket = TokenBucket(100, 50, clock=clock)
    assert bucket.delay_s(1050) == 0.0
    bucket.take(1050)
    assert bucket.delay_s(1) == pytest.approx(10.01)


@pytest.mark.parametrize(("rate", "burst"), [(0, None), (-1, None), (1, 0)])
def test_impossible_limits_are_refused(rate: float, burst: float | None) -> None:
    with pytest.raises(InvalidArgument, match="must be above zero"):
        TokenBucket(rate, burst)


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
    assert found == pytest.approx(300 / 3)


def test_only_the_window_counts() -> None:
    measured = monitor(100.0, window_s=10.0)
    measured.add(1_000_000, 0.0, 1.0)
    assert measured.measured() is None
    measured.add(10, 98.0, 99.0)
    found = measured.measured()
    assert found is not None
    assert found == pytest.approx(10)


def test_memory_is_bounded() -> None:
    measured = monitor(10_000.0, window_s=1e9)
    for number in range(3000):
        measured.add(1, float(number), number + 0.5)
    assert len(measured._transfers) == 1000
