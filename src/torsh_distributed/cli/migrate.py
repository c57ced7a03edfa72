"""`torsh migrate`: what coming over from another library takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.errors import IoError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _migrate() -> None:
    """Look at scripts of other libraries: what runs as it is, and what to write instead."""


@app.command()
def check(
    scripts: Annotated[list[Path], typer.Argument(help="Python scripts; they are read, not run.")],
    diff: Annotated[bool, typer.Option("--diff", help="Print the proposed change.")] = False,
) -> None:
    """List the distributed calls of scripts, with our counterpart of each."""
    from torsh_distributed.migrate.script_check import check_script, proposed_change

    for script in scripts:
        try:
            source = script.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise IoError("the script cannot be read", script=str(script), reason=str(error)) from error
        if diff:
            typer.echo(proposed_change(source, str(script)), nl=False)
            continue
        found = check_script(source, str(script))
        for one in found:
            counterpart = f" → {one.counterpart}" if one.counterpart else ""
            typer.echo(f"{script}:{one.line}: {one.call}{counterpart}: {one.note}")
        if not found:
            typer.echo(f"{script}: no distributed calls")
