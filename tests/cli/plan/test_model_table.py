"""`torsh plan show --model`: what a plan does to a model, without ranks and without memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.plan.commands import app


@pytest.fixture
def built_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A function of the user's that builds a model of the demo."""
    (tmp_path / "my_training_script.py").write_text(
        "from torsh_distributed.train.demos.gpt import CharGPT\n\n\ndef build():\n    return CharGPT(65)\n"
    )
    monkeypatch.chdir(tmp_path)
    return "my_training_script:build"


def test_the_table_shows_what_the_plan_does_to_the_model(built_by: str) -> None:
    shown = CliRunner().invoke(app, ["show", "--model", built_by, "--set", "mesh.tp=2"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "blocks: blocks (" in shown.output
    assert "head: head" in shown.output
    assert "blocks.*.feed_forward.*" in shown.output
    assert "column_local" in shown.output
