"""The collector against events whose times are known."""

from __future__ import annotations

import time

import pytest

from tests.observe.packets import FakeRank
from torsh_distributed import events
from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.observe.metrics.rank_collector import RankCollector


def test_the_parts_of_a_step_add_up_to_it() -> None:
    rank = FakeRank(0)
    for _ in range(3):
        rank.step(compute_s=0.02, wait_s=0.01, data_s=0.005)
    step = rank.collector.steps[-1]
    assert step.step_s == pytest.approx(0.035)
    assert (step.forward_s, step.backward_s, step.optimizer_s) == pytest.approx((0.006, 0.01, 0.004))
    assert (step.wait_s, step.data_s, step.other_s) == pytest.approx((0.01, 0.005, 0.0))
    assert step.busy_s == pytest.approx(0.02)
    rank.collector.settle()
    metrics = rank.collector.metrics
    assert metrics("torsh_wait_ratio").value == pytest.approx(0.01 / 0.035)
    assert metrics("torsh_samples_per_second").value == pytest.approx(32 / 0.035, rel=0.2)
    assert metrics("torsh_collective_bytes", "all_reduce").value == 3 * 4096


def test_live_events_are_counted_by_thread_and_rare_ones_kept() -> None:
    collector = RankCollector().attach()
    try:
        with events.phase("forward"):
            pass
        with events.waiting("all_reduce", "g", num_started=1, num_bytes=100):
            pass
        record = recorder.begin("all_reduce", "g", 100)
        recorder.end(record)
        events.emit(events.StepEvent(step=7, loss=float("nan"), duration_s=0.5))
        events.emit(events.CheckpointEvent(action="saved", path="/x", step=7, num_bytes=5, duration_s=0.1))
        events.emit(events.EvaluationEvent(step=7, loss=0.25, duration_s=0.5))
        events.emit(events.BucketEvent(step=7, index=0, num_bytes=80, duration_s=0.1, wire_bytes=20))
        failed = {"op": "all_gather", "group": "h", "sequence": 1, "num_bytes": 9, "start_s": 0.0, "duration_s": 0.1}
        events.emit(events.CollectiveEvent(**failed, error="OperationTimeout: late"))
    finally:
        collector.detach()
    events.emit(events.StepEvent(step=8, duration_s=0.5))
    collector.fold()
    metrics = collector.metrics
    assert metrics("torsh_step").value == 7, "nothing is taken after detach"
    assert metrics("torsh_loss").value is None
    assert metrics("torsh_loss").num_nonfinite == 1
    assert metrics("torsh_collectives", "all_reduce").value == 1, "told by wait and by record, counted once"
    assert metrics("torsh_collective_seconds", "all_reduce").value == pytest.approx(record.duration_s)
    assert metrics("torsh_collective_errors", "all_gather").value == 1
    assert metrics("torsh_checkpoint_step").value == 7
    assert metrics("torsh_validation_loss").value == 0.25
    assert metrics("torsh_gradient_wire_bytes").value == 20
    assert [mark["type"] for mark in collector.marks] == ["checkpoint", "evaluation"]


def test_a_flood_of_events_is_bounded_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torsh_distributed.observe.metrics.rank_collector.MAX_PENDING_EVENTS", 10)
    collector = RankCollector().attach()
    try:
        for step in range(25):
            events.emit(events.StepEvent(step=step, duration_s=0.1))
    finally:
        collector.detach()
    collector.fold()
    assert collector.metrics("torsh_observe_dropped").value == 15


def test_a_step_of_another_thread_than_the_main_one_is_the_training_threads() -> None:
    collector = RankCollector()
    now_s = time.monotonic()
    other = collector._thread + 1
    for event, at_s in (
        (events.StepEvent(step=1, duration_s=0.25), now_s),
        (events.PhaseEvent(phase="forward", start_s=now_s, duration_s=0.1), now_s + 0.1),
        (events.StepEvent(step=2, duration_s=0.2), now_s + 0.2),
    ):
        collector._pending.append((event, other, at_s, None))
    collector.fold()
    assert collector.steps[0].step_s == pytest.approx(0.25)
    assert collector.steps[1].forward_s == pytest.approx(0.1)
