"""`torsh chaos`: what it refuses before anything starts, and what it passes to the launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli import chaos
from torsh_distributed.cli.app import app
from torsh_distributed.elastic import Fault
from torsh_distributed.errors import InvalidArgument


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there is no fault to inject"),
        (["--fault", "burn rank 1 at step 2"], "not a fault"),
        (["--fault", "kill rank 1 at step 2", "--launcher", "mpirun"], "torsh or torchrun"),
    ],
)
def test_what_cannot_be_is_refused_first(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["chaos", *options, "train.py"])
    assert isinstance(result.exception, InvalidArgument)
    assert message in result.exception.message


@pytest.mark.parametrize("launcher", ["torsh", "torchrun"])
def test_the_rest_of_the_line_is_the_launchers(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[list[str], dict[str, str]]] = []

    def call(command: list[str], env: dict[str, str]) -> int:
        called.append((command, env))
        return 3

    monkeypatch.setattr(chaos.subprocess, "call", call)
    line = ["--nproc-per-node", "4", "--max-restarts=2", "train.py", "--seed", "5"]
    options = ["--random", "2", "--seed", "1", "--ranks", "4", "--launcher", launcher]
    result = CliRunner().invoke(app, ["chaos", *options, *line])
    assert result.exit_code == 3
    ((command, env),) = called
    assert command == [sys.executable, "-m", chaos.LAUNCHERS[launcher], *line]
    assert len(env["TORSH_FAULTS"].split(";")) == 2
    assert result.output.count("its point was never reached") == 2


def test_workers_find_the_faults(tmp_path: Path) -> None:
    env = chaos.chaos_environment([Fault.parse("kill rank 1 at step 2")], tmp_path / "log")
    assert env["TORSH_FAULTS"] == "kill rank 1 at step 2"
    assert env["PYTHONPATH"].split(":")[0].endswith("worker/startup")
