"""The risk score: memory and heat by the time that is left, steps by how slow they became, memory errors by count."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from torsh_distributed.events import HardwareEvent, MemoryEvent, StepEvent
from torsh_distributed.events.jsonl import to_record
from torsh_distributed.observe.job.rank_risk import ALARM, RiskMonitor, alarms, recorded_alarms


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


def has_alarm(own_s: Callable[[int, random.Random], float], seed: int) -> bool:
    monitor, source = RiskMonitor(), random.Random(seed)
    found = [monitor.observe_own_time(0, step=at, time=float(at), own_s=own_s(at, source)) for at in range(400)]
    return any(one is not None and one.score >= ALARM for one in found)


def test_ranks_on_a_machine_that_others_use_are_seldom_named_and_slower_ones_always() -> None:
    """Half of the steps are disturbed, by up to sixteen times their length: 37 of 40 such ranks had been named."""
    disturbed = sum(
        has_alarm(lambda _, source: 0.005 + source.choice((0.0, 0.0, 0.02, 0.08)), seed) for seed in range(40)
    )
    slower = sum(
        has_alarm(lambda at, source: 0.02 * source.uniform(0.9, 1.1) * (1 + max(0.0, at - 120) / 200), seed)
        for seed in range(40)
    )
    assert disturbed <= 4
    assert slower == 40


def test_heat_scores_by_the_time_to_the_limit_and_noise_does_not() -> None:
    noise = (0.0, 1.0, -1.0, 0.5, -0.5)

    def series(slope: float) -> list[HardwareEvent]:
        return [
            HardwareEvent(
                time=10.0 * number,
                rank=2,
                device="cuda:0",
                celsius=60 + slope * 10 * number + noise[number % 5],
                limit_celsius=90,
            )
            for number in range(60)
        ]

    (found,) = alarms(series(0.06))
    assert (found.rank, found.reason) == (2, "temperature")
    assert 300 < found.time < 500, "before the limit is reached, at 500 s, and not from the start"
    assert alarms(series(0.0)) == []
    (hot,) = alarms([HardwareEvent(time=0.0, rank=0, device="host", celsius=101.0, limit_celsius=100.0)])
    assert hot.score == 1


@pytest.mark.parametrize(
    ("corrected", "uncorrected", "is_alarm"),
    [(1000, 0, False), (1003, 0, False), (1010, 0, True), (1000, 1, True), (3, 0, False)],
    ids=["as before", "a few", "many", "one lost", "the driver was loaded again"],
)
def test_memory_errors_count_from_the_start_of_the_run(corrected: int, uncorrected: int, is_alarm: bool) -> None:
    events = [
        HardwareEvent(time=0.0, rank=1, device="cuda:1", corrected_errors=1000, uncorrected_errors=0),
        HardwareEvent(time=10.0, rank=1, device="cuda:1", corrected_errors=corrected, uncorrected_errors=uncorrected),
    ]
    assert [risk.reason for risk in alarms(events)] == ["ecc"] * is_alarm
