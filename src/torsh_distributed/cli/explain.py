"""`torsh explain CODE`: what an error means and what to do about it."""

from __future__ import annotations

import difflib
import inspect
from typing import Annotated

import typer

from torsh_distributed.errors import InvalidArgument, TorshError, error_codes

app = typer.Typer(add_completion=False)


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="The name before the colon of an error; none lists all.")] = None,
) -> None:
    """Say what an error means, whether a retry may help, and what to do."""
    kinds = error_codes()
    if code is None:
        _list(kinds)
        return
    by_name = {name.lower(): kind for name, kind in kinds.items()}
    if code.lower() not in by_name:
        near = difflib.get_close_matches(code.lower(), by_name, n=1)
        raise InvalidArgument(
            "no error has this code",
            hint=f"did you mean {by_name[near[0]].__name__}?" if near else "`torsh explain` lists all of them",
            code=code,
        )
    kind = by_name[code.lower()]
    typer.echo(f"{typer.style(kind.__name__, bold=True)}: {inspect.cleandoc(kind.__doc__ or '')}")
    typer.echo(f"Retryable: {'yes' if kind.retryable else 'no'}. What to do:")
    for number, line in enumerate(kind.advice, start=1):
        typer.echo(f"  {number}. {line}")


def _list(kinds: dict[str, type[TorshError]]) -> None:
    # Imported here: explaining one error needs no table.
    from rich.console import Console
    from rich.table import Table

    table = Table("code", "means", "retryable")
    for name, kind in kinds.items():
        table.add_row(name, inspect.cleandoc(kind.__doc__ or "").splitlines()[0], "yes" if kind.retryable else "no")
    Console(highlight=False).print(table)
