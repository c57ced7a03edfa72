"""`torsh store`: a TCP store that belongs to no rank."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from torsh_distributed.comm.store import TcpStoreServer

app = typer.Typer(help="Serve a key-value store for ranks to meet in.", add_completion=False, no_args_is_help=True)

Host = Annotated[str, typer.Option(help="Address to listen on. Any but loopback lets other nodes connect.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one and prints it.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="TORSH_STORE_TOKEN",
        help="Secret that clients must share. Prefer the variable: arguments can be read by other users.",
    ),
]


@app.callback()
def _group() -> None:
    """Serve a key-value store for ranks to meet in."""


@app.command("serve")
def serve(host: Host = "127.0.0.1", port: Port = 29400, token: Token = None) -> None:
    """Serve a TCP store until SIGINT or SIGTERM. Plain torch TCPStore clients are served too, unless a token is set."""
    # Blocked before the server's thread starts, so only the wait below receives them.
    ending = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    with TcpStoreServer(host, port, token=token or None) as server:
        typer.echo(f"serving {server.url}; Ctrl-C ends it")
        received = signal.sigwait(ending)
        typer.echo(f"ended by {signal.Signals(received).name}")
