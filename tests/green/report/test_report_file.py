from __future__ import annotations

import json
from pathlib import Path

import pytest

from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.export.registry import make_exporter
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.metrics.step_record import StepRecord


def told(view: JobView, second: int) -> None:
    """A step of 90 J, of ten that the job has."""
    view.energy.take_step(
        StepRecord(second, float(second), 1.0, None, None, None, None, None, None, 1.0, num_samples=4)
    )
    event = events.EnergyEvent(
        time=float(second),
        node=0,
        meter="m",
        source="rapl",
        is_measured=True,
        joules=90.0,
        duration_s=1.0,
        g_per_kwh=400.0,
    )
    view.take(events.to_record(event))
    view.take({"type": "metrics", "rank": 0, "facts": {"total_steps": 10}})


@pytest.mark.parametrize("name", ["kept/energy.json", "kept/energy.html"])
def test_the_report_of_a_running_job_is_kept_in_a_file_with_the_predicted_total(tmp_path: Path, name: str) -> None:
    view, path = JobView(), tmp_path / name
    exporter = make_exporter(f"energy:{path}")
    exporter.export(view)
    assert not path.exists(), "no meter was read yet"
    for second in (1, 2, 3):
        told(view, second)
    exporter.export(view)
    first = path.read_text()
    if path.suffix == ".json":
        found = json.loads(first)
        assert found["total_kwh"] == pytest.approx(270 / 3.6e6)
        assert found["predicted_kwh"] == pytest.approx(900 / 3.6e6)
        assert found["predicted_co2_kg"] == pytest.approx(900 / 3.6e6 * 0.4)
    else:
        assert "predicted kwh" in first
    told(view, 4)
    exporter.close(view)
    assert path.read_text() != first
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_file_of_another_kind_and_a_job_without_meters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"\.json or \.html"):
        make_exporter(f"energy:{tmp_path / 'energy.pdf'}")
    with pytest.raises(InvalidArgument, match="no meter was read"):
        make_exporter(f"energy:{tmp_path / 'energy.json'}").close(JobView())
