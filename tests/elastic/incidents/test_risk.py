"""The risk score: memory by the time that is left, steps by how much slower they are than at first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torsh_distributed.elastic.incidents.risk import ALARM, RiskMonitor, alarms, recorded_alarms
from torsh_distributed.events import MemoryEvent, StepEvent
from torsh_distributed.events.jsonl import to_record


def test_memory_that_grows_scores_by_the_time_that_is_left() -> None:
    monitor = RiskMonitor(horizon_s=60)
    scores = []
    for second in range(260):
        used = (100 + second) << 20
        risk = monitor.observe(
            MemoryEvent(
                time=1000.0 + second,
                rank=3,
                device="host",
                allocated_bytes=used,
                peak_bytes=used,
                limit_bytes=400 << 20,
            )
        )
        scores.append(0.0 if risk is None else risk.score)
    assert scores[50] == pytest.approx(60 / 250, rel=0.05)
    assert scores[100] < ALARM <= scores[-1]
    assert scores == sorted(scores)


def test_steps_without_a_measured_wait_say_nothing() -> None:
    monitor = RiskMonitor()
    assert all(monitor.observe(StepEvent(step=step, duration_s=step)) is None for step in range(100))


def test_a_rank_that_gets_slower_is_named_and_its_peer_is_not(tmp_path: Path) -> None:
    steps = [
        StepEvent(
            time=float(step), rank=rank, step=step, duration_s=0.1 + slower, comm_s=0.02 + (slower if rank else 0.0)
        )
        for step in range(120)
        for rank in (0, 1)
        for slower in [max(0, step - 40) * 0.002]
    ]
    (found,) = alarms(steps)
    assert (found.rank, found.reason) == (0, "slowing")
    for rank in (0, 1):
        records = [json.dumps(to_record(event)) for event in steps if event.rank == rank]
        (tmp_path / f"rank-{rank}.jsonl").write_text("\n".join(records) + "\n")
    assert recorded_alarms(tmp_path) == [found]
    assert alarms([event for event in steps if event.step < 40]) == []
