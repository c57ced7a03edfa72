"""`torsh plan time`: how long, for how much, and how many GPUs for a deadline."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.planner.machine.test_machine_file import measurement
from torsh_distributed.cli.plan.commands import app
from torsh_distributed.planner.machine.machine_file import MachineFile, fingerprint, machine_path
from torsh_distributed.planner.machine.past_runs import PastRun, PastRuns

MODEL = "tests.planner.live_memory:wide"
ARGS = ["time", MODEL, "--tokens", "1B", "--machine", "h100", "--batch", "4096"]


def told(*args: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*ARGS, *args], env={"COLUMNS": "180"})
    assert result.exit_code == status, result.output
    return result.output


def rows_of(output: str) -> dict[int, list[str]]:
    """The cells of each row by number of GPUs."""
    lines = (line.strip("│ ").split("│") for line in output.splitlines() if line.startswith("│"))
    return {int(cells[0]): [cell.strip() for cell in cells] for cells in lines}


def test_a_row_for_each_number_of_gpus_with_its_cost() -> None:
    rows = rows_of(told("--gpus", "8,1", "--price", "2"))
    assert list(rows) == [1, 8]
    hours, device_hours, cost = rows[8][6:]
    assert float(device_hours) == pytest.approx(8 * float(hours), abs=4.5)
    assert float(cost) == pytest.approx(2 * float(device_hours), abs=2)
    assert "(" not in cost, "no interval before there are runs"


def test_what_any_of_the_predictions_has_not_measured_is_named() -> None:
    note = next(line for line in told("--gpus", "1,16").splitlines() if line.startswith("not measured"))
    assert "fp32 operations in a second" in note
    assert "latency and bandwidth between nodes" in note


def test_the_number_of_gpus_for_a_deadline_is_found() -> None:
    alone = float(rows_of(told("--gpus", "1"))[1][6])
    output = told("--deadline", f"{alone / 3:.2f}h")
    rows = rows_of(output)
    assert list(rows) == [2**power for power in range(len(rows))], "until one makes it"
    hours = {count: cells[6] for count, cells in rows.items()}
    assert all(text.endswith("(late)") for count, text in hours.items() if count < max(rows))
    assert f"{max(rows)} GPUs make it" in output


def test_where_none_makes_it_the_status_says_so() -> None:
    assert "none of them makes it in 1s" in told("--gpus", "1,2", "--deadline", "1s", status=1)


def test_hours_and_cost_have_the_interval_of_past_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"compute": 1.0, "wait": 0.0, "optimizer": 0.0, "bubble": 0.0}
    past = PastRuns(
        tuple(
            PastRun(date="2026-11-19", what="M", num_ranks=1, predicted_s=parts, measured_s={**parts, "compute": ratio})
            for ratio in (0.9, 1.0, 1.1)
        )
    )
    monkeypatch.setenv("TORSH_STATE_DIR", str(tmp_path))
    alone = replace(measurement(1), collectives={}, interference=None)
    MachineFile(fingerprint(), {1: alone}, past).save(machine_path())
    low, high = past.interval(1) or (0.0, 0.0)
    here = ["time", MODEL, "--tokens", "1T", "--gpus", "1", "--batch", "64"]
    result = CliRunner().invoke(app, here, env={"COLUMNS": "180"})
    assert result.exit_code == 0, result.exception
    output = result.output
    hours = rows_of(output)[1][6]
    expected, least, most = (float(one) for one in re.findall(r"[\d.]+", hours.replace(",", "")))
    assert (least, most) == pytest.approx((low * expected, high * expected), rel=0.01)
    assert "what 90 % of runs would take" in output
    unsure = CliRunner().invoke(app, [*here, "--deadline", f"{expected * 1.01:.1f}h"], env={"COLUMNS": "180"})
    assert unsure.exit_code == 0
    assert "1 GPUs make it in" in unsure.output
    assert "none of them would" in unsure.output
