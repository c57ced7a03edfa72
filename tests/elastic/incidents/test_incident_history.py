"""Incidents: written at once and for this user alone, read back as one per failure, with their statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed import events
from torsh_distributed.cli.app import app
from torsh_distributed.elastic.incidents.incident_history import failure_statistics, incidents_of, read_incidents
from torsh_distributed.errors import IoError
from torsh_distributed.events.recorded import event_of
from torsh_distributed.train.recovery.open_incidents import OpenIncidents


def report(name: str, at: float, rank: int, status: str, **fields: object) -> events.IncidentEvent:
    base = {"failure": "divergence", "action": "roll back", "step": 5, "detail": None, "duration_s": None}
    record = {"time": at, "rank": rank, "type": "incident", "incident": name, "status": status, **base, **fields}
    event = event_of(record)
    assert isinstance(event, events.IncidentEvent)
    return event


def test_an_incident_is_on_disk_at_once(tmp_path: Path) -> None:
    with events.JsonlSink(tmp_path, interval_s=1000):
        incidents = OpenIncidents()
        incidents.open("storage", "go on", step=3, detail="full")
        incidents.open("storage", "go on", step=4, detail="still full")  # the same incident
        (found,) = read_incidents(tmp_path)
        assert (found.failure, found.status, found.step, found.duration_s) == ("storage", "open", 3, None)
        incidents.step_done(4)  # nothing was done about it yet
        assert read_incidents(tmp_path)[0].status == "open"
        incidents.acted("storage")
        incidents.step_done(5)
        (found,) = read_incidents(tmp_path)
    assert found.status == "resolved"
    assert found.duration_s is not None
    assert (tmp_path / "incidents.jsonl").stat().st_mode & 0o777 == 0o600


def test_reports_of_several_ranks_are_one_incident() -> None:
    found = incidents_of(
        [
            report("a", 100.0, 0, "open"),
            report("b", 100.2, 1, "open"),
            report("a", 101.0, 0, "resolved", duration_s=1.0),
            report("b", 101.5, 1, "resolved", duration_s=1.3),
            report("c", 200.0, 0, "open"),
            report("d", 210.0, 0, "open", failure="storage", step=9),
            report("d", 212.0, 0, "failed", failure="storage", duration_s=2.0),
        ]
    )
    assert [(one.failure, one.ranks, one.status, one.duration_s) for one in found] == [
        ("divergence", (0, 1), "resolved", 1.3),
        ("divergence", (0,), "open", None),
        ("storage", (0,), "failed", 2.0),
    ]
    numbers = failure_statistics(found, observed_s=303.3)
    assert numbers["all"].num_incidents == 3
    assert numbers["all"].mean_time_to_failure_s == pytest.approx(100)
    assert numbers["divergence"].mean_time_to_recovery_s == pytest.approx(1.3)
    assert numbers["storage"].mean_time_to_recovery_s is None


def test_the_command_shows_them(tmp_path: Path) -> None:
    reports = [report("a", 100.0, 0, "open"), report("a", 101.0, 0, "resolved", duration_s=1.0)]
    lines = map(events.to_record, reports)
    (tmp_path / "incidents.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    shown = CliRunner().invoke(app, ["incidents", str(tmp_path)])
    assert "divergence" in shown.output
    told = json.loads(CliRunner().invoke(app, ["incidents", str(tmp_path), "--json"]).output)
    assert told["statistics"]["all"]["mean_time_to_recovery_s"] == 1.0
    (tmp_path / "empty").mkdir()
    assert CliRunner().invoke(app, ["incidents", str(tmp_path / "empty")]).output == "no incidents\n"
    with pytest.raises(IoError, match="no such directory"):
        read_incidents(tmp_path / "nowhere")


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    sound = json.dumps(events.to_record(report("a", 100.0, 0, "open")))
    absurd = sound.replace("100.0", "1e400")
    (tmp_path / "incidents.jsonl").write_text(f'{{"broken": \n{sound}\n[]\n{absurd}\n{{"incident": 1}}\n')
    (tmp_path / "rank-0.jsonl").write_text('{"type": "step"}\nnot json\n{"type": "memory", "time": "now"}\n')
    shown = CliRunner().invoke(app, ["incidents", str(tmp_path)])
    assert shown.exception is None
    assert shown.output.count("divergence") == 2  # the incident, and its line in the sums
