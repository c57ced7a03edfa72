"""`torsh ps`: servers that hold parameters for workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Serve parameters to workers that train them.", add_completion=False, no_args_is_help=True)

Name = Annotated[str, typer.Option(help="Name under which workers find this server; each server has its own.")]
Store = Annotated[
    str | None,
    typer.Option(help="Store where workers and servers meet: tcp://HOST:PORT or file://PATH; else the job's."),
]
Keep = Annotated[
    Path | None,
    typer.Option(help="Directory for the state, to continue with later; else shared memory until this command ends."),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on for workers of other nodes.")]
LostAfter = Annotated[
    float, typer.Option(min=0.0, help="Seconds that a worker whose connection ended has to come back.")
]
Import = Annotated[
    list[str] | None, typer.Option("--import", help="Module to import first, with optimizers it exposes; repeatable.")
]


@app.callback()
def _group() -> None:
    """Serve parameters to workers that train them."""


@app.command("serve")
def serve(
    name: Name = "ps0",
    store: Store = None,
    keep: Keep = None,
    host: Host = None,
    lost_after: LostAfter = 10.0,
    imports: Import = None,
) -> None:
    """Hold parameters until SIGINT or SIGTERM. A server that is killed is started again with its state."""
    import importlib

    from torsh_distributed.rpc import parameters

    for module in imports or ():
        importlib.import_module(module)

    def tell() -> None:
        typer.echo(f"serving parameters as {name}; Ctrl-C ends it")

    parameters.serve(name, on_ready=tell, store=store, keep=keep, host=host, lost_after_s=lost_after)
