"""Lost workers and nodes are incidents, over when a step has run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.elastic.incidents.incident_history import failure_statistics, observed_seconds, read_incidents


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def told(at: float, action: str, detail: str | None = None) -> dict[str, Any]:
    base = {"rank": -1, "type": "membership", "world_size": 3, "attempt": 0}
    return {"time": at, "action": action, "detail": detail, **base}


def step(at: float, number: int) -> dict[str, Any]:
    return {"time": at, "rank": 0, "type": "step", "step": number, "duration_s": 0.1}


def test_a_worker_lost_in_place_is_over_when_a_step_has_run(tmp_path: Path) -> None:
    write(
        tmp_path / "launcher-7.jsonl",
        told(100.0, "started"),
        told(110.0, "lost", "worker 1: signal 9 (SIGKILL, killed)"),
        told(110.1, "health", "recovering: worker 0 and 2: epoch 1"),
        told(110.5, "recovered", "regrouped: 2 workers from step 6"),
        told(140.0, "ended", "exit code 0"),
    )
    (found,) = read_incidents(tmp_path)
    assert (found.failure, found.ranks, found.action, found.status) == (
        "lost_worker",
        (1,),
        "go on in place",
        "resolved",
    )
    assert found.duration_s == pytest.approx(0.5)
    assert "SIGKILL" in str(found.detail)
    numbers = failure_statistics([found], observed_s=observed_seconds(tmp_path))["lost_worker"]
    assert numbers.mean_time_to_failure_s == pytest.approx(39.5)
    assert numbers.mean_time_to_recovery_s == pytest.approx(0.5)


def test_a_restart_is_over_at_the_first_step_after_it(tmp_path: Path) -> None:
    lost = "node 1: its launcher does not answer"
    write(tmp_path / "launcher-7.jsonl", told(10.0, "lost", lost), told(12.0, "restarted"))
    write(tmp_path / "launcher-8.jsonl", told(10.3, "lost", lost), told(12.1, "restarted"))
    write(tmp_path / "rank-0.jsonl", step(9.0, 4), step(10.1, 5), step(15.0, 5))
    (found,) = read_incidents(tmp_path)
    assert (found.failure, found.ranks, found.action, found.status) == ("lost_node", (), "restart", "resolved")
    assert found.duration_s == pytest.approx(5.0)


def test_what_ended_the_job_failed_and_what_is_not_over_is_open(tmp_path: Path) -> None:
    write(tmp_path / "launcher-7.jsonl", told(10.0, "lost", "rank 2: exit code 1"), told(11.0, "ended", "exit code 1"))
    (found,) = read_incidents(tmp_path)
    assert (found.ranks, found.status, found.duration_s) == ((2,), "failed", 1.0)
    write(tmp_path / "launcher-7.jsonl", told(10.0, "lost", "rank 2: exit code 1"), told(11.0, "restarted"))
    write(tmp_path / "rank-0.jsonl", step(10.5, 3))
    (found,) = read_incidents(tmp_path)
    assert (found.status, found.duration_s, found.action) == ("open", None, "restart")
