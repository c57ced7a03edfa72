"""Show a job's output until it is over, then say how it ended."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import typer

from torsh_distributed.terminal_text import shown

if TYPE_CHECKING:
    from torsh_distributed.clusters.base import JobStatus
    from torsh_distributed.clusters.submitting import SubmittedJob

_INTERRUPTED = 130
_FIRST_LOOK_S, _LAST_LOOK_S = 0.1, 5.0


def follow_to_the_end(job: SubmittedJob, *, queue_limit_s: float | None = None) -> int:
    """Print the output of all ranks as it comes, then the report; returns the exit code of the job.

    While it waits for resources, why is shown. One that has not started within `queue_limit_s` is cancelled, which
    raises OperationTimeout. Ctrl-C stops showing, not the job.
    """
    try:
        _await_start(job, queue_limit_s)
        for line in job.logs(follow=True):
            typer.echo(shown(line))
    except KeyboardInterrupt:
        typer.echo(
            f"\ntorsh: {job.name} goes on; `torsh logs -f {job.name}` shows it, `torsh cancel {job.name}` ends it",
            err=True,
        )
        return _INTERRUPTED
    status = job.status()
    for line in exit_report(job, status):
        typer.echo(shown(line), err=True)
    return exit_code(status)


def _await_start(job: SubmittedJob, limit_s: float | None) -> None:
    """Return when the job no longer waits in the queue. Polls: engines send nothing."""
    from torsh_distributed.clusters.base import JobState
    from torsh_distributed.errors import OperationTimeout

    start_s = time.monotonic()
    pause, pause_s, shown = threading.Event(), _FIRST_LOOK_S, ""
    while (status := job.status()).state is JobState.QUEUED:
        if status.detail != shown:
            shown = status.detail
            typer.echo(f"torsh: {job.name} waits in the queue: {shown}", err=True)
        if limit_s is not None and time.monotonic() - start_s > limit_s:
            job.cancel()
            raise OperationTimeout(
                f"{job.name} did not start within {limit_s:g} s and was cancelled; it waited for: {shown}",
                hint="ask for less, or raise --queue-timeout",
                operation="submit",
                job=job.record.job_id,
            )
        pause.wait(pause_s)
        pause_s = min(_LAST_LOOK_S, pause_s * 1.5)


def exit_report(job: SubmittedJob, status: JobStatus) -> list[str]:
    """How the job stands, in words: its state, its exit code, and what its engine says about it."""
    first, *rest = status.detail.splitlines() or [""]
    code = "" if status.exit_code in (None, 0) else f" with exit code {status.exit_code}"
    said = f": {first}" if first else ""
    return [f"torsh: {job.name} ({job.record.engine} {job.record.job_id}) {status.state}{code}{said}", *rest]


def exit_code(status: JobStatus) -> int:
    """What the command returns for it."""
    from torsh_distributed.clusters.base import JobState

    if status.exit_code is not None:
        return status.exit_code
    return 0 if status.state is JobState.SUCCEEDED else 1
