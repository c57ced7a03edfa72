"""`torsh plan show --model`: what a plan does to a model, without ranks and without memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.plan.commands import app
from torsh_distributed.cli.plan.model_table import load_model
from torsh_distributed.errors import ConfigurationError


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


def test_the_model_gets_no_memory(built_by: str) -> None:
    assert all(param.is_meta for param in load_model(built_by).parameters())


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("train", "not of the form module:function"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("my_training_script:bulid", r"has no function bulid(.|\n)*did you mean build\?"),
        ("builtins:dict", "it returns a dict, not a model"),
    ],
)
def test_a_wrong_name_is_refused(built_by: str, where: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_model(where)
