"""Show a job's output until it is over, then say how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from torsh_distributed.clusters.cluster_engine import JobStatus
    from torsh_distributed.clusters.submitting import SubmittedJob

_INTERRUPTED = 130


def follow_to_the_end(job: SubmittedJob) -> int:
    """Print the output of all ranks as it comes, then the report; returns the exit code of the job.

    Ctrl-C stops showing, not the job.
    """
    try:
        for line in job.logs(follow=True):
            typer.echo(line)
    except KeyboardInterrupt:
        typer.echo(
            f"\ntorsh: {job.name} goes on; `torsh logs -f {job.name}` shows it, `torsh cancel {job.name}` ends it",
            err=True,
        )
        return _INTERRUPTED
    status = job.status()
    for line in exit_report(job, status):
        typer.echo(line, err=True)
    return exit_code(status)


def exit_report(job: SubmittedJob, status: JobStatus) -> list[str]:
    """How the job stands, in words: its state, its exit code, and what its engine says about it."""
    first, *rest = status.detail.splitlines() or [""]
    code = "" if status.exit_code in (None, 0) else f" with exit code {status.exit_code}"
    said = f": {first}" if first else ""
    return [f"torsh: {job.name} ({job.record.engine} {job.record.job_id}) {status.state}{code}{said}", *rest]


def exit_code(status: JobStatus) -> int:
    """What the command returns for it."""
    from torsh_distributed.clusters.cluster_engine import JobState

    if status.exit_code is not None:
        return status.exit_code
    return 0 if status.state is JobState.SUCCEEDED else 1
