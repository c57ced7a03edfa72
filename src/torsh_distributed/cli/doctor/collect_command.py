"""`torsh collect`: the bundle for a bug report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from torsh_distributed.errors import CommunicationError, JobNotFound

app = typer.Typer(add_completion=False)


@app.command()
def collect(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Plans, logs, events: files, or directories of them.", exists=True)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The archive, .tar.gz.")] = None,
    pid: Annotated[int | None, typer.Option(help="Launcher of a running job: add what it is doing.")] = None,
) -> None:
    """Bundle versions, checks, variables, logs and plans for a bug report, with secrets masked."""
    from torsh_distributed.launch.control.job_commands import ask_launcher
    from torsh_distributed.observe.bug_report import collect as write_bundle
    from torsh_distributed.observe.machine.software import validate_environment

    target = output or Path(f"torsh-report-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    reports: dict[str, Any] = {}
    if pid is not None:
        try:
            reports["diagnosis"] = ask_launcher(pid, "diagnosis")
        except (CommunicationError, JobNotFound) as error:
            reports["diagnosis"] = error.to_dict()
            typer.echo(f"the job could not be asked: {error.message}", err=True)
    names = write_bundle(
        target, environ=os.environ, results=validate_environment(os.environ), files=files or (), reports=reports
    )
    typer.echo(f"{target}: {len(names)} files, {target.stat().st_size / 1024:.0f} KiB; secrets are masked")
    typer.echo("look through it before you send it: tar tzf shows the names, tar xzf unpacks it")
