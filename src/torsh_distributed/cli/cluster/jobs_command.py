"""`torsh jobs`: the jobs that this user submitted, and where they stand."""

from __future__ import annotations

import dataclasses
import json as json_format
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LOOKS_AT_ONCE = 8

Json = Annotated[bool, typer.Option("--json", help="Print one JSON array.")]
Forget = Annotated[
    str | None, typer.Option("--forget", help="Remove what is remembered about this job, once it is over.")
]


@app.command()
def jobs(json: Json = False, forget: Forget = None) -> None:
    """List the jobs that you submitted, and where they stand."""
    from torsh_distributed.clusters.base import JobState, JobStatus
    from torsh_distributed.clusters.job_records import JobRecord, all_records
    from torsh_distributed.clusters.job_records import forget as forget_record
    from torsh_distributed.clusters.submitting import find_job
    from torsh_distributed.errors import InvalidArgument, TorshError

    if forget is not None:
        job = find_job(forget)
        if not job.status().state.is_over:
            raise InvalidArgument(
                f"{job.name} is not over", hint=f"end it first: torsh cancel {job.name}", job=job.name
            )
        forget_record(job.name)
        return

    def look(record: JobRecord) -> JobStatus:
        try:
            return find_job(record.name).status()
        except TorshError as error:
            # One cluster that does not answer must not hide the jobs of the others.
            return JobStatus(state=JobState.LOST, detail=f"{error.code}: {error.message}")

    records = all_records()
    # At once: a cluster that does not answer takes its time to be given up.
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        found = list(zip(records, pool.map(look, records), strict=True))
    if json:
        rows = [{**dataclasses.asdict(record), **dataclasses.asdict(status)} for record, status in found]
        typer.echo(json_format.dumps(rows, indent=1))
        return
    if not found:
        typer.echo("no jobs; `torsh submit --to ENGINE script.py` submits one")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("job", "engine", "id", "ranks", "submitted", "state", "detail", box=None)
    for record, status in found:
        at = datetime.fromtimestamp(record.submitted_at_s).strftime("%Y-%m-%d %H:%M:%S")
        code = f"exit code {status.exit_code}" if status.exit_code else ""
        detail = status.detail.splitlines()[0] if status.detail else code
        row = (record.name, record.engine, record.job_id, str(record.workers), at, status.state, detail)
        table.add_row(*row)
    for column in table.columns[:-1]:
        column.no_wrap = True
    Console(highlight=False, soft_wrap=True, markup=False).print(table)
