"""The risk score on recordings of real runs: how often it names the rank and the reason before the failure, and how
often it cries wolf. The numbers asserted are the ones that docs/decisions/0041-exactly-once.md states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.elastic.incidents.risk import ALARM, RiskMonitor, RiskScore, alarms
from torsh_distributed.events import Event, MemoryEvent, StepEvent, event_types

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))


def read(path: Path) -> tuple[dict[str, Any], list[Event]]:
    label, *lines = map(json.loads, path.read_text().splitlines())
    return label, [event_types()[line.pop("type")](**line) for line in lines]


def verdict(path: Path) -> str:
    label, events = read(path)
    found: list[RiskScore] = alarms(events, horizon_s=60.0)
    expected = {"leak": "memory", "slowing": "slowing"}.get(label["kind"])
    right = [one for one in found if (one.rank, one.reason) == (label["victim"], expected)]
    if expected is None:
        return "false alarm" if found else "quiet"
    if not right:
        return "missed"
    if label["kind"] == "leak" and right[0].time >= label["failed_at"]:
        return "late"
    return "hit" if len(right) == len(found) else "hit, and a false alarm"


def test_failures_are_announced_and_healthy_runs_are_not() -> None:
    verdicts = {path.stem: verdict(path) for path in RECORDINGS}
    assert len(verdicts) == 24
    sick = [one for name, one in verdicts.items() if name.startswith(("leak", "slowing"))]
    well = [one for name, one in verdicts.items() if name.startswith(("healthy", "noisy"))]
    assert sick.count("hit") >= 11, verdicts
    assert well.count("quiet") >= 11, verdicts


def test_memory_that_grows_scores_by_the_time_that_is_left() -> None:
    monitor = RiskMonitor(horizon_s=60)
    scores = []
    for second in range(200):
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
