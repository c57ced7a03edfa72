"""Commands that are imported when they are invoked: the table beside them says what they say themselves."""

from __future__ import annotations

import importlib

import pytest
import typer.main

from torsh_distributed.cli import app as torsh
from torsh_distributed.cli.bench import app as bench

TABLE = {**torsh.COMMANDS, **bench.COMMANDS}


@pytest.mark.parametrize("name", TABLE)
def test_the_line_of_help_in_the_table_is_the_commands_own(name: str) -> None:
    module, line = TABLE[name]
    command = typer.main.get_command(importlib.import_module(module).app)
    assert (command.help or "").splitlines()[0] == line


def test_a_command_is_loaded_once_and_under_its_name() -> None:
    group = typer.main.get_command(torsh.app)
    assert list(group.commands) == list(torsh.COMMANDS)
    assert group.commands["explain"] is group.commands["explain"]
