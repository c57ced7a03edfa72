"""Records as the parameters of a command: typer sees their fields."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer
from typer.testing import CliRunner

from torsh_distributed.cli.option_records import takes_records


class Inner(NamedTuple):
    """Fields of a record in a record."""

    path: Annotated[str, typer.Argument(help="Where.")]
    count: Annotated[int, typer.Option(help="How many.", min=1)] = 2


class Outer(NamedTuple):
    """A record and an option of its own."""

    inner: Inner
    is_loud: Annotated[bool, typer.Option("--loud", help="Say more.")] = False


def test_the_fields_of_records_are_options_with_their_defaults_and_texts() -> None:
    app, seen = typer.Typer(add_completion=False), []

    @app.command()
    @takes_records
    def show(context: typer.Context, outer: Outer) -> None:
        """Shows what it was given."""
        seen.append((context.info_name, outer))

    runner = CliRunner()
    assert runner.invoke(app, ["here", "--loud"]).exit_code == 0
    assert runner.invoke(app, ["there", "--count", "5"]).exit_code == 0
    assert [outer for _, outer in seen] == [Outer(Inner("here", 2), True), Outer(Inner("there", 5), False)]
    assert runner.invoke(app, ["here", "--count", "0"]).exit_code == 2
    help_text = runner.invoke(app, ["--help"]).output
    assert all(text in help_text for text in ("Shows what it was given.", "Where.", "How many.", "--loud", "Say more."))
