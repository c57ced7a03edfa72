"""`torsh compare A B`: two runs side by side, from their event files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    one: Annotated[Path, typer.Argument(help="Event files of a run.")],
    other: Annotated[Path, typer.Argument(help="Event files of another.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two runs by their event files."""
    import json as json_format

    from rich.console import Console
    from rich.table import Table

    from torsh_distributed.observe.job.run_comparison import compare_runs
    from torsh_distributed.observe.job.run_files import EventFiles

    rows = compare_runs(EventFiles(one).read_all(), EventFiles(other).read_all())
    if json:
        typer.echo(json_format.dumps([row.to_dict() for row in rows]))
        return
    table = Table("", str(one), str(other), "difference")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.what, row.show(row.first), row.show(row.second), row.difference)
    Console().print(table)
