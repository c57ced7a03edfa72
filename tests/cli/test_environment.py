"""`torsh env`: every variable, its value and where it comes from; no secret."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.environment import app
from torsh_distributed.known_variables import KNOWN


def test_every_variable_is_listed_with_its_value_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("TORSH_LOG", "ERROR")
    monkeypatch.setenv("TORSH_JOB_TOKEN", "very secret indeed")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0, shown.output
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in shown.output.splitlines() if "│" in line]
    by_name = {row[0]: row[1:3] for row in rows}
    assert set(KNOWN) <= set(by_name)
    assert by_name["TORSH_LOG"] == ["ERROR", "environment"]
    assert by_name["MASTER_PORT"] == ["29500", "default"]
    assert by_name["TORSH_JOB_TOKEN"] == ["(hidden)", "environment"]
    assert by_name["SLURM_PROCID"] == ["-", "not set"]
    assert "very secret indeed" not in shown.output
