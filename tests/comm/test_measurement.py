"""Timing collectives on real ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed.comm.measurement import (
    OPERATIONS,
    CollectiveTiming,
    NetworkMetrics,
    NetworkProfiler,
    time_collective,
)
from torsh_distributed.errors import InvalidArgument


def time_all() -> list[CollectiveTiming]:
    return [time_collective(op, 4096, duration_s=0.02) for op in OPERATIONS]


def test_every_operation_is_timed_alike_on_all_ranks(world: World) -> None:
    first, second = world.run(time_all, num_ranks=2, backend="shm")
    assert first == second, "the times are those of the slowest rank, on both"
    assert [timing.op for timing in first] == list(OPERATIONS)
    for timing in first:
        assert 0 < timing.best_s <= timing.median_s
        assert timing.bytes_per_s == pytest.approx(4096 / timing.median_s)


def test_an_unknown_operation_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidArgument, match="use one of: all_reduce"):
        time_collective("all_scatter", 4096)


SECONDS = st.floats(1e-7, 10.0)


def metrics(small_s: float, large_s: float, num_ranks: int = 2) -> NetworkMetrics:
    return NetworkMetrics(
        num_ranks=num_ranks,
        all_reduce_s={4096: small_s, 2**20: large_s},
        retransmitted=None,
        congestion=1.0,
        stability=None,
        time_s=0.0,
    )


@given(SECONDS, SECONDS)
def test_the_line_goes_through_what_was_measured_and_never_falls(one_s: float, other_s: float) -> None:
    seen = metrics(min(one_s, other_s), max(one_s, other_s))
    assert seen.byte_s > 0
    assert seen.latency_s >= 0
    assert seen.estimated_s(0) <= seen.estimated_s(1000) <= seen.estimated_s(2**20)
    if seen.latency_s > 0:
        assert seen.estimated_s(2**20) == pytest.approx(max(one_s, other_s), rel=1e-3, abs=1e-6)


def test_a_ring_of_two_carries_a_buffer_and_a_long_one_almost_two() -> None:
    assert metrics(0.0, 2**20 - 4096).bytes_per_s == pytest.approx(1.0)
    assert metrics(0.0, 2**20 - 4096, num_ranks=8).bytes_per_s == pytest.approx(1.75)


def look_thrice() -> tuple[NetworkMetrics, ...]:
    profiler = NetworkProfiler(sizes=(2**20, 64, 4096), history=2)
    for _ in range(3):
        assert profiler.measure() is profiler.history[-1]
    return profiler.history


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_rank_gets_the_same_numbers_and_keeps_the_last(world: World, backend: str) -> None:
    first, second, third = world.run(look_thrice, num_ranks=3, backend=backend)
    assert first == second == third
    assert len(first) == 2
    for look in first:
        assert list(look.all_reduce_s) == [64, 4096, 2**20]
        assert all(seconds > 0 for seconds in look.all_reduce_s.values())
        assert look.num_ranks == 3
        assert look.congestion >= 1.0
        assert look.stability is not None
        assert 0 <= look.stability <= 1
    assert first[0].time_s < first[1].time_s


def look_before_and_after(folder: Path) -> tuple[NetworkMetrics, NetworkMetrics]:
    """In the middle rank 0 lets the test change the link, and goes on when it has: opening a pipe waits for that."""
    profiler = NetworkProfiler()
    before = profiler.measure()
    if dist.get_rank() == 0:
        (folder / "seen").write_text("once")
        (folder / "changed").read_text()
    dist.barrier()
    return before, profiler.measure()


def test_the_rate_of_a_link_is_found_and_so_is_its_fall(world: World, lab: Lab, tmp_path: Path) -> None:
    hosts = lab.hosts(2)
    for name in ("seen", "changed"):
        os.mkfifo(tmp_path / name)

    def slow_down() -> None:
        (tmp_path / "seen").read_text()
        for host in hosts:
            host.limit(0.02)
        (tmp_path / "changed").write_text("now")

    for host in hosts:
        host.limit(0.1)
    change = threading.Thread(target=slow_down, daemon=True)
    change.start()
    first, second = world.run(look_before_and_after, tmp_path, backend="gloo", hosts=hosts, timeout_s=60)
    change.join()
    assert first == second
    before, after = first
    # A token bucket lets the first 32 KiB through at once; a loaded machine may be slower than the link.
    assert 0.2 * 12.5e6 < before.bytes_per_s < 1.25 * 12.5e6
    assert 0.2 * 2.5e6 < after.bytes_per_s < 1.25 * 2.5e6
    assert before.congestion == 1.0
    assert after.congestion > 2
    assert before.stability is None
    assert after.stability is not None
    assert after.stability < 0.6
    assert before.retransmitted is not None, "gloo sends over TCP"
    assert 0 <= before.retransmitted < 0.5


def refused() -> list[str]:
    found = []
    for options in ({"sizes": (4096,)}, {"sizes": (2, 4096)}, {"history": 0}):
        with pytest.raises(InvalidArgument) as caught:
            NetworkProfiler(**options)  # type: ignore[arg-type]
        found.append(str(caught.value))
    return found


def alone() -> str:
    with pytest.raises(InvalidArgument) as caught:
        NetworkProfiler()
    return str(caught.value)


def test_what_cannot_be_measured_is_refused(world: World) -> None:
    for messages in world.run(refused):
        assert all("two different sizes" in message for message in messages)
    assert "a group of one rank has no network" in world.run(alone, num_ranks=1)[0]
