"""Statistics: percentiles near the exact ones, merging without loss, filled by events alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.collectives.point_to_point import recv, send
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.recording.communication_stats import CommunicationStats, DurationSketch, OperationStats

durations = st.floats(min_value=1e-8, max_value=1e4)


def event(
    duration_s: float = 1.0,
    *,
    op: str = "all_reduce",
    num_bytes: int = 100,
    peer: int | None = None,
    error: str | None = None,
) -> events.CollectiveEvent:
    return events.CollectiveEvent(
        op=op, group="0", sequence=1, num_bytes=num_bytes, start_s=0.0, duration_s=duration_s, peer=peer, error=error
    )


@given(values=st.lists(durations, min_size=1, max_size=300), percent=st.sampled_from([50, 95, 99]))
def test_percentiles_are_within_one_percent_of_the_exact_ones(values: list[float], percent: int) -> None:
    sketch = DurationSketch()
    for value in values:
        sketch.add(value)
    exact = float(np.percentile(values, percent, method="inverted_cdf"))
    assert sketch.percentile_s(percent) == pytest.approx(exact, rel=0.0101)


def test_memory_is_bounded_and_odd_durations_count() -> None:
    sketch = DurationSketch()
    for exponent in np.linspace(-30, 30, 20_000):
        sketch.add(float(10.0**exponent))
    sketch.add(0.0)
    assert len(sketch.to_dict()) < 1620
    assert sum(sketch.to_dict().values()) == 20_001


records = st.lists(
    st.tuples(
        durations,
        st.sampled_from(["all_reduce", "send"]),
        st.integers(0, 10**9),
        st.sampled_from([None, 0, 3]),
        st.sampled_from([None, None, "OperationTimeout: late"]),
    ),
    max_size=40,
)


def record_all(stats: CommunicationStats, given: list[tuple[float, str, int, int | None, str | None]]) -> None:
    for duration_s, op, num_bytes, peer, error in given:
        stats.record(event(duration_s, op=op, num_bytes=num_bytes, peer=peer, error=error))


def comparable(stats: CommunicationStats) -> dict[str, object]:
    """Sums of floats depend on the order of adding; the rest must be equal to the bit."""
    record = stats.to_dict()
    del record["since"]
    for figures in (*record["by_op"].values(), *record["by_peer"].values()):
        for name in ("total_s", "mean_s", "bytes_per_s"):
            figures[name] = None if figures[name] is None else pytest.approx(figures[name])
        del figures["last_time"]
    return record


@given(here=records, there=records)
def test_merging_is_as_if_all_had_been_recorded_in_one_place(
    here: list[tuple[float, str, int, int | None, str | None]],
    there: list[tuple[float, str, int, int | None, str | None]],
) -> None:
    one, two, both = CommunicationStats(), CommunicationStats(), CommunicationStats()
    record_all(one, here)
    record_all(two, there)
    record_all(both, here + there)
    one.merge(CommunicationStats.from_dict(json.loads(two.to_json())))
    assert one.to_dict()["by_op"].keys() == both.to_dict()["by_op"].keys()
    assert comparable(one) == comparable(both)


def test_figures_of_a_known_history() -> None:
    stats = OperationStats()
    assert stats.mean_s is stats.p50_s is stats.bytes_per_s is stats.min_s is None
    for duration_s in (1.0, 2.0, 3.0):
        stats.record(event(duration_s, num_bytes=600))
    stats.record(event(50.0, error="OperationTimeout: all_reduce did not end"))
    assert (stats.count, stats.num_successes, stats.num_errors) == (4, 3, 1)
    assert stats.errors == {"OperationTimeout": 1}
    assert (stats.min_s, stats.max_s, stats.mean_s, stats.num_bytes) == (1.0, 3.0, 2.0, 1800)
    assert stats.p50_s == pytest.approx(2.0, rel=0.0101)
    assert stats.p99_s == pytest.approx(3.0, rel=0.0101)
    assert stats.p99_s is not None
    assert stats.p99_s <= 3.0
    assert stats.bytes_per_s == pytest.approx(300)
    assert stats.peak_bytes_per_s == pytest.approx(600)


def test_reset_forgets_and_copies_do_not_change() -> None:
    stats = CommunicationStats()
    stats.record(event(peer=2))
    before = stats.by_op
    stats.record(event())
    assert before["all_reduce"].count == 1
    assert stats.total.count == 2
    assert stats.by_peer[2].count == 1
    since = stats.since
    stats.reset()
    assert stats.by_op == {}
    assert stats.by_peer == {}
    assert stats.since >= since


def test_only_what_happens_while_attached_counts() -> None:
    stats = CommunicationStats()
    events.emit(event())
    with stats:
        stats.attach()  # twice is once
        events.emit(event())
        events.emit(events.StepEvent(step=1, duration_s=1.0))
    events.emit(event())
    stats.detach()
    assert stats.total.count == 1


def a_training_loop() -> dict[str, dict[str, int]]:
    me, size = dist.get_rank(), dist.get_world_size()
    with CommunicationStats() as stats:
        for _ in range(3):
            all_reduce(torch.zeros(25))
        barrier()
        if me == 0:
            send(torch.zeros(2), 1)
        elif me == 1:
            recv(torch.zeros(2), 0)
    everyone = CommunicationStats()
    for record in all_gather_object(stats.to_dict()):
        everyone.merge(CommunicationStats.from_dict(record))
    assert everyone.by_op["all_reduce"].count == 3 * size
    return {
        "count": {op: figures.count for op, figures in stats.by_op.items()},
        "bytes": {op: figures.num_bytes for op, figures in stats.by_op.items()},
        "peers": {str(peer): figures.num_bytes for peer, figures in stats.by_peer.items()},
    }


def test_they_fill_up_from_a_plain_loop_and_merge_over_ranks(world: World) -> None:
    first, second = world.run(a_training_loop)
    assert first == {
        "count": {"all_reduce": 3, "barrier": 1, "send": 1},
        "bytes": {"all_reduce": 300, "barrier": 0, "send": 8},
        "peers": {"1": 8},
    }
    assert second["count"] == {"all_reduce": 3, "barrier": 1, "recv": 1}
    assert second["peers"] == {"0": 8}
