"""`torsh dashboard`: the page of a job, from its event files, while they grow or after the run."""

from __future__ import annotations

import errno
import secrets
import threading
from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.cli.observe.options import DEFAULT_PAGE_PORT
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.settings import LOOPBACK_HOST

app = typer.Typer(add_completion=False)


@app.command()
def dashboard(
    events_dir: Annotated[
        Path, typer.Argument(envvar="TORSH_EVENTS_DIR", help="Directory of the job's event files, TORSH_EVENTS_DIR.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for any.")] = DEFAULT_PAGE_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Off loopback the page asks for a token.")
    ] = LOOPBACK_HOST,
    report: Annotated[Path | None, typer.Option(help="Write one HTML file instead of serving.")] = None,
) -> None:
    """Show a job's event files as a live page, or as a report."""
    from torsh_distributed.observe.job.page_state import page_state
    from torsh_distributed.observe.job.run_files import EventFiles
    from torsh_distributed.observe.page.html_report import write_report
    from torsh_distributed.observe.page.page_routes import PageFeed, page_routes
    from torsh_distributed.observe.serving.guarded_server import GuardedServer, needs_token

    files = EventFiles(events_dir)
    files.read_all()
    if report is not None:
        typer.echo(f"report: {write_report(report, page_state(files.view))}")
        return
    lock = threading.Lock()

    def newest() -> dict[str, object]:
        with lock:
            files.poll()
            return page_state(files.view)

    feed = PageFeed(newest)
    token = secrets.token_urlsafe(16) if needs_token(host) else None
    try:
        server = GuardedServer(host, port, page_routes(feed), token=token)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise InvalidArgument(
            f"the page cannot listen on {host}:{port}: {error.strerror}",
            hint="give another --port, or 0 for any" if taken else "give an address of this machine as --host",
        ) from error
    with server:
        typer.echo(f"dashboard at {server.url} (Ctrl-C ends it)")
        threading.Event().wait()
