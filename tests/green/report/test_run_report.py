from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cli.test_app import torsh
from tests.observe.page.chromium import Chromium
from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.report.report_page import report_page
from torsh_distributed.green.report.run_report import run_report
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.metrics.step_record import StepRecord


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


def test_a_renewable_share_is_of_the_time_for_which_the_feed_told_it() -> None:
    """The last share had counted on for all that came after the feed was gone."""
    view = metered()
    last = {"g_per_kwh": 100.0, "source": "file", "zone": "GB", "signal": "average", "basis": "given"}
    view.take(events.to_record(events.CarbonEvent(time=3600.0, renewable_share=1.0, **last)))
    for minute in range(61, 121):
        event = events.EnergyEvent(
            time=60.0 * minute,
            node=0,
            meter="package-0",
            source="rapl",
            is_measured=True,
            joules=60_000.0,
            duration_s=60.0,
        )
        view.take(events.to_record(event))
    found = run_report(view)
    assert found.value("renewable_share") == pytest.approx(0.25)
    assert found.value("ungraded_kwh") == pytest.approx(1.0)


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


def test_an_inventory_has_the_average_of_the_grid_and_what_was_bought_and_never_a_marginal_value() -> None:
    found = run_report(metered(), pue=1.5, market_g_per_kwh=20.0)
    assert found.value("scope2_location_kg") == pytest.approx(0.6)
    assert found.value("scope2_market_kg") == pytest.approx(0.03)
    assert (found.begin, found.end) == ("1970-01-01T00:00:00+00:00", "1970-01-01T01:00:00+00:00")
    view = metered()
    marginal = events.CarbonEvent(
        time=3600.0, g_per_kwh=700.0, source="watttime", zone="CAISO_NORTH", signal="marginal", basis="forecast"
    )
    view.take(events.to_record(marginal))
    assert run_report(view).value("scope2_location_kg") is None
    part = metered()
    unknown = events.EnergyEvent(
        time=3660.0, node=0, meter="package-0", source="rapl", is_measured=True, joules=1.0, duration_s=60.0
    )
    part.take(events.to_record(unknown))
    assert run_report(part).value("scope2_location_kg") is None, "a joule without an intensity is in no inventory"


def test_the_course_over_time_adds_up_to_the_total() -> None:
    found = run_report(metered())
    assert sum(row["kwh"] for row in found.trend) == pytest.approx(1.0)
    assert sum(row["grams"] for row in found.trend) == pytest.approx(400.0)
    assert {round(row["kw"], 6) for row in found.trend} == {1.0}
    page = report_page(found)
    assert page.count("<rect ") == len(found.trend)
    assert "<polyline" in page


def test_each_epoch_has_its_energy_and_its_grams_and_the_course_its_efficiency() -> None:
    view = JobView()
    for second in range(1, 9):
        event = events.EnergyEvent(
            time=float(second),
            node=0,
            meter="gpu 0",
            source="nvml",
            is_measured=True,
            joules=100.0 * second,
            duration_s=1.0,
            g_per_kwh=400.0 if second < 8 else None,
            epoch=None if second == 1 else (second - 2) // 3,
            utilization=0.5,
            celsius=50.0 + second,
        )
        view.take(events.to_record(event))
        step = StepRecord(second, float(second), 1.0, None, None, None, None, None, None, 1.0, num_samples=8)
        view.energy.take_step(step)
    found = run_report(view, pue=2.0)
    kwh = [2 * joules / 3.6e6 for joules in (900.0, 1800.0, 800.0)]
    assert [(row["epoch"], row["kwh"]) for row in found.epochs] == [
        (number, pytest.approx(value)) for number, value in enumerate(kwh)
    ]
    assert [row["co2_kg"] for row in found.epochs] == [pytest.approx(kwh[0] * 0.4), pytest.approx(kwh[1] * 0.4), None]
    (meter,) = found.meters
    assert (meter["utilization"], meter["peak_celsius"]) == (pytest.approx(0.5), 58.0)
    assert meter["samples_per_joule"] == pytest.approx(64 / 3600)
    rates = [row["samples_per_joule"] for row in found.trend if row["samples_per_joule"] is not None]
    assert rates == sorted(rates, reverse=True)
    page = report_page(found)
    assert "epoch 2" in page
    assert "computed 50% of the time; at most 58 °C; 0.01778 samples per joule" in page


def test_a_gpu_with_another_job_on_it_is_said_to_be_shared_with_this_jobs_part() -> None:
    view = JobView()
    for second, share in ((1, None), (2, 0.5), (3, 0.25)):
        event = events.EnergyEvent(
            time=float(second),
            node=0,
            meter="gpu 0",
            source="nvml",
            is_measured=True,
            joules=300.0,
            duration_s=1.0,
            num_others=0 if share is None else 2,
            own_share=share,
        )
        view.take(events.to_record(event))
    (told,) = [note for note in run_report(view).notes if "other jobs" in note]
    assert told == (
        "node 0, gpu 0: up to 2 processes of other jobs computed on it while 600 J were counted, which are in the "
        "figures; this job's part of the computing time then was 38%"
    )


def test_a_run_that_was_not_metered_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="no energy"):
        run_report(JobView())


@pytest.mark.ranks
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
    limits = ("--max-kwh", "1e-9", "--max-co2-kg", "5", "--csv", str(tmp_path / "energy.csv"))
    done = torsh("green", "report", str(tmp_path), *limits)
    assert done.returncode == 1, "for a check in CI"
    assert "total_kwh is 1.1111e-05, of 1e-09" in done.stderr
    assert "co2_kg is not known" in done.stderr
    rows = list(csv.DictReader((tmp_path / "energy.csv").read_text().splitlines()))
    assert sum(float(row["kwh"]) for row in rows) == pytest.approx(40 / 3.6e6)


@pytest.mark.needs_browser
def test_a_browser_shows_the_page_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "energy.html").write_text(report_page(run_report(metered())))
    with Chromium(tmp_path / "profile") as browser:
        browser.open((tmp_path / "energy.html").as_uri())
        browser.until("document.readyState === 'complete' && document.querySelector('h1') !== null")
        assert browser.text("h1") == "Energy of <b>run</b>"
        assert browser.ask("document.querySelectorAll('svg rect').length") == 60
        shown = browser.ask("document.querySelector('svg').getBoundingClientRect().height")
        assert shown > 100
        assert "0.4" in browser.text("body")
