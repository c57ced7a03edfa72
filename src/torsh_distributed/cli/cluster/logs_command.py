"""`torsh logs`: the output of a submitted job."""

from __future__ import annotations

from typing import Annotated

import typer

from torsh_distributed.terminal_text import shown

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Job = Annotated[str, typer.Argument(help="The job's name, or its engine's id.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until it is over, then say how it ended.")]


@app.command()
def logs(job: Job, follow: Follow = False) -> None:
    """Show the output of all ranks of a submitted job."""
    from torsh_distributed.cli.cluster.following import follow_to_the_end
    from torsh_distributed.clusters.submitting import find_job

    found = find_job(job)
    if follow:
        raise typer.Exit(follow_to_the_end(found))
    for line in found.logs():
        typer.echo(shown(line))
