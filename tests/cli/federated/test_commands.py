"""`torsh federated`: options become the config, in a simulation and on a server alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.federated.commands import app
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated import FederatedConfig, MultiKrum
from torsh_distributed.federated.deployment import serve

TASK = """
from tests.federated.small_task import SmallTask

TASK = SmallTask()
"""


class _Asked(Exception):
    """The server would start now."""

    def __init__(self, config: FederatedConfig) -> None:
        super().__init__()
        self.config = config


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return str(path)


def problem(*command: str) -> BaseException | None:
    return CliRunner().invoke(app, command).exception


def test_a_server_takes_a_robust_rule_as_a_simulation_does(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(task: object, config: FederatedConfig, **_: Any) -> None:
        raise _Asked(config)

    monkeypatch.setattr(serve, "open_server", asked)
    options = ["--rule", "multi_krum", "--hostile", "2", "--per-round", "9"]
    found = problem("serve", task, "--directory", str(tmp_path), *options)
    assert isinstance(found, _Asked), found
    assert isinstance(found.config.rule, MultiKrum)
    assert (found.config.rule.hostile, found.config.min_clients) == (2, 7)
    result = CliRunner().invoke(app, ["simulate", task, "--clients", "9", "--rounds", "1", *options])
    assert result.exit_code == 0, result.output
    assert "9 of 9 clients" in result.output


def test_a_rule_that_cannot_hold_or_has_no_effect_is_refused(task: str, tmp_path: Path) -> None:
    found = problem(
        "serve", task, "--directory", str(tmp_path), "--rule", "median", "--hostile", "2", "--min-clients", "3"
    )
    assert isinstance(found, ConfigurationError)
    assert "with f = 2 that is 5 updates, and n = 3" in str(found)
    for command in (["simulate", task], ["serve", task, "--directory", str(tmp_path)]):
        found = problem(*command, "--hostile", "2")
        assert isinstance(found, InvalidArgument)
        assert "--hostile is for --rule" in str(found)
