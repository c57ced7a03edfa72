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
        str,
        typer.Argument(help="The job's name, as its launcher or `torsh submit` said it, or its launcher's pid."),
    ],
    workers: Annotated[int, typer.Argument(min=1, help="How many workers it should have.")],
) -> None:
    """Give a running elastic job more or fewer workers."""
    if _scale_submitted(job, workers):
        return
    answer = ask_launcher(find_job(job).pid, "scale", workers=workers)
    text = str(answer.get("text", ""))
    if not answer.get("is_done"):
        raise InvalidArgument(text, hint="look at --min-workers and --max-workers of the job", job=job)
    typer.echo(text)


def _scale_submitted(name: str, workers: int) -> bool:
    """Whether the job is a submitted one, which its engine was then told to scale."""
    from torsh_distributed.clusters.job_records import all_records
    from torsh_distributed.clusters.submitting import find_job as find_submitted

    if all(name not in (record.name, record.job_id) for record in all_records()):
        return False
    find_submitted(name).scale(workers)
    typer.echo(f"{workers} workers are wanted now")
    return True
