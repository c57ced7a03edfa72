"""`torsh scale`: change the number of workers of a running elastic job."""

from __future__ import annotations

from typing import Annotated

import typer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.control.job_commands import ask_launcher, find_job

app = typer.Typer(add_completion=False)


@app.command()
def scale(
    job: Annotated[
        str, typer.Argument(help="The job's name, as its launcher said it (--rdzv-id), or its launcher's pid.")
    ],
    workers: Annotated[int, typer.Argument(min=1, help="How many workers it should have.")],
) -> None:
    """Give a running elastic job more or fewer workers."""
    answer = ask_launcher(find_job(job).pid, "scale", workers=workers)
    text = str(answer.get("text", ""))
    if not answer.get("is_done"):
        raise InvalidArgument(text, hint="look at --min-workers and --max-workers of the job", job=job)
    typer.echo(text)
