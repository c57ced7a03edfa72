"""`torsh store`: a TCP store that belongs to no rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.comm.store import TcpStoreServer
from torsh_distributed.comm.trust.job_secret import read_or_create_secret_file

app = typer.Typer(help="Serve a key-value store for ranks to meet in.", add_completion=False, no_args_is_help=True)

Host = Annotated[str, typer.Option(help="Address to listen on. Any but loopback lets other nodes connect.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one and prints it.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the secret that clients must share, created if missing; or TORSH_STORE_TOKEN."),
]


@app.callback()
def _group() -> None:
    """Serve a key-value store for ranks to meet in."""


@app.command("serve")
def serve(host: Host = "127.0.0.1", port: Port = 29400, token_file: TokenFile = None) -> None:
    """Serve a TCP store until SIGINT or SIGTERM. Plain torch TCPStore clients are served too, unless a token is set."""
    # Blocked before the server's thread starts, so only the wait below receives them.
    ending = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    # Not an option: other users can read arguments.
    token = read_or_create_secret_file(token_file) if token_file else os.environ.get("TORSH_STORE_TOKEN") or None
    with TcpStoreServer(host, port, token=token) as server:
        typer.echo(f"serving {server.url}; Ctrl-C ends it")
        received = signal.sigwait(ending)
        typer.echo(f"ended by {signal.Signals(received).name}")
