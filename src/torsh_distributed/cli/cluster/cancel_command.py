"""`torsh cancel`: end a submitted job."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def cancel(job: Annotated[str, typer.Argument(help="The job's name, or its engine's id.")]) -> None:
    """End a submitted job; returns when nothing of it runs."""
    from torsh_distributed.cli.cluster.following import exit_report
    from torsh_distributed.clusters.submitting import find_job

    found = find_job(job)
    found.cancel()
    for line in exit_report(found, found.status()):
        typer.echo(line)
