"""Budgets that outlive the launcher, and what becomes of a record that nobody can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.events import EnergyEvent
from torsh_distributed.green.carbon.intensity import Intensity, IntensitySeries
from torsh_distributed.green.run_control import RunControl
from torsh_distributed.plan import GreenConfig


def control(record: Path | None, notes: list[str], **green: object) -> RunControl:
    config = GreenConfig(enabled=True, **{"max_kwh": 1.0, "on_budget": "stop", **green})
    return RunControl(config, min_workers=1, max_workers=2, now=0.0, record=record, note=notes.append)


def spend(kwh: float) -> EnergyEvent:
    return EnergyEvent(node=0, meter="m", source="rapl", is_measured=True, joules=kwh * 3.6e6, duration_s=1.0)


def test_a_job_that_is_started_again_has_the_rest_of_its_budget(tmp_path: Path) -> None:
    notes: list[str] = []
    record = tmp_path / "kept" / "energy.json"
    first = control(record, notes)
    actions, news = first.take_energy(spend(0.7))
    assert actions == []
    assert [(one.name, one.spent, one.action) for one in news] == [("energy", pytest.approx(0.7), "ok")]
    first.keep()  # then it is killed
    second = control(record, notes)
    assert "goes on from what it spent" in notes[-1]
    assert [action for action, _ in second.take_energy(spend(0.2))[0]] == ["warn"]
    actions, news = second.take_energy(spend(0.15))
    assert [action for action, _ in actions] == ["stop"]
    assert news[-1].action == "stop"
    second.close(is_done=False)
    assert record.exists()
    third = control(record, notes)
    assert [action for action, _ in third.take_energy(spend(1e-6))[0]] == ["stop"], "nothing is left"
    third.close(is_done=True)
    assert not record.exists(), "the run is over: the next one is another"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', '{"version": 1, "budget": {"spent": 3}}'])
def test_a_damaged_record_is_said_and_counts_as_nothing(tmp_path: Path, text: str) -> None:
    notes: list[str] = []
    record = tmp_path / "energy.json"
    record.write_text(text)
    found = control(record, notes)
    assert any("not understood and counts as nothing" in note for note in notes), notes
    assert found.take_energy(spend(0.5))[0] == []
    found.keep()
    assert control(record, notes).take_energy(spend(0.4))[0] != []


def test_without_a_directory_it_is_said_that_nothing_is_kept() -> None:
    notes: list[str] = []
    found = control(None, notes)
    found.keep()
    assert "whole budget and time again" in notes[0]
    assert found.decide(IntensitySeries(()), now=0.0) is None, "no policy"


def test_the_first_hold_measures_what_waiting_takes() -> None:
    notes: list[str] = []
    found = control(None, notes, strategy="minimize_carbon", deadline="10h", carbon="file", carbon_file="feed.csv")

    def grid(*values: float) -> IntensitySeries:
        hours = zip((0.0, 3600.0), (3600.0, 36000.0), values, strict=True)
        return IntensitySeries(
            [Intensity(g, start, end, "average", "forecast", "file", "here") for start, end, g in hours]
        )

    def read(watts: float, now: float, series: IntensitySeries) -> str:
        found.take_energy(EnergyEvent(node=0, meter="m", source="rapl", is_measured=True, joules=watts, duration_s=1.0))
        decided = found.decide(series, now=now)
        assert decided is not None
        return decided[0].action

    def steps(*numbers: int) -> None:
        found.take_steps(steps=[(step, 1.0) for step in numbers], total_steps=1000, workers=2)

    even, dirty = grid(300.0, 300.0), grid(500.0, 50.0)
    assert read(300.0, 1.0, even) == "train"
    steps(1, 2, 3, 4)
    assert {read(300.0, now, even) for now in (2.0, 3.0, 4.0, 5.0)} == {"train"}
    assert [read(300.0, now, dirty) for now in (6.0, 7.0)] == ["train", "hold"], "there was no idle moment before"
    for now in range(8, 14):
        assert read(280.0, now, dirty) == "hold"
        steps(now)  # told late: the powers before it are not those of a job that waits
    for now in range(14, 18):
        steps()
        last = read(290.0, now, dirty)
    assert last == "train", "waiting takes as much as training"
    steps(18)
    assert [read(300.0, now, dirty) for now in (18.0, 19.0, 20.0)][-1] == "train"
