"""`torsh render` as a command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.cluster.render_command import app


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return "train.py"


def test_files_are_printed_under_their_names(script: str) -> None:
    done = CliRunner().invoke(app, ["--nodes", "2", "--name", "t", "compose", script, "--lr", "1"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("==> Dockerfile <==")
    assert "==> compose.yaml <==" in done.output
    assert "- --lr\n" in done.output


def test_files_are_written_to_a_folder(script: str, tmp_path: Path) -> None:
    arguments = ["--name", "t", "-o", "out", "--set", "image=i", "--set", "kind=jobset", "k8s", script]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "job.yaml").read_text().count("kind: JobSet") == 1
