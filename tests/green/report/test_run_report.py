from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_app import torsh
from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.report.report_page import report_page
from torsh_distributed.green.report.run_report import run_report
from torsh_distributed.observe.job.job_view import JobView


def metered(**facts: object) -> JobView:
    """One kilowatt for an hour, a third of it from wind, at 400 g/kWh."""
    view = JobView()
    view.header.run_id = "<b>run</b>"
    carbon = events.CarbonEvent(
        time=1.0, g_per_kwh=400.0, source="file", zone="GB", signal="average", basis="given", renewable_share=0.25
    )
    view.take(events.to_record(carbon))
    for minute in range(1, 61):
        event = events.EnergyEvent(
            time=60.0 * minute,
            node=0,
            meter="package-0",
            source="rapl",
            is_measured=True,
            joules=60_000.0,
            duration_s=60.0,
            ranks=(0, 1),
            g_per_kwh=400.0,
        )
        view.take(events.to_record(event))
    return view


def test_a_kilowatt_for_an_hour_is_a_kilowatt_hour_and_four_tenths_of_a_kilogram() -> None:
    found = run_report(metered())
    assert found.label == "measured"
    assert found.value("total_kwh") == pytest.approx(1.0)
    assert found.value("co2_kg") == pytest.approx(0.4)
    assert found.value("peak_kw") == pytest.approx(1.0)
    assert found.value("grid_g_per_kwh") == pytest.approx(400.0)
    assert found.value("renewable_share") == pytest.approx(0.25)
    assert found.value("score") is None, "no samples were counted: nothing is put in their place"


def test_the_building_multiplies_everything_once_and_offsets_are_taken_off() -> None:
    found = run_report(metered(), pue=1.5, offset_kg=0.1)
    assert found.value("total_kwh") == pytest.approx(1.5)
    assert found.value("co2_kg") == pytest.approx(0.6)
    assert found.value("net_co2_kg") == pytest.approx(0.5)
    assert found.value("grid_g_per_kwh") == pytest.approx(400.0)
    assert sum(found.by_rank.values()) == pytest.approx(1.5 * 3.6e6)
    with pytest.raises(InvalidArgument):
        run_report(metered(), pue=0.5)


def test_every_figure_has_its_formula_and_names_of_a_run_cannot_be_markup() -> None:
    found = run_report(metered())
    told = found.to_dict()
    assert set(told["formulae"]) == set(told["units"]) == {figure.name for figure in found.figures}
    assert "RAPL" in told["sources"][0]
    page = report_page(found)
    assert "<b>run" not in page
    assert "&lt;b&gt;run" in page
    assert "<script" not in page


def test_a_run_that_was_not_metered_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="no energy"):
        run_report(JobView())


def test_the_command_writes_json_and_a_page_from_event_files(tmp_path: Path) -> None:
    lines = []
    for second in range(1, 5):
        event = events.EnergyEvent(
            time=1e9 + second,
            rank=-1,
            node=0,
            meter="processors",
            source="estimate",
            is_measured=False,
            joules=10.0,
            duration_s=1.0,
            detail="12 W × load",
        )
        lines.append(json.dumps(events.to_record(event)))
    (tmp_path / "launcher-1.jsonl").write_text("\n".join(lines) + "\n")
    done = torsh("green", "report", str(tmp_path), "--json", "-", "--html", str(tmp_path / "energy.html"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["label"] == "estimated"
    assert told["total_kwh"] == pytest.approx(40 / 3.6e6)
    assert told["co2_kg"] is None
    assert "12 W × load" in (tmp_path / "energy.html").read_text()
