"""The `torsh` command: thin Typer commands over the library; the one place that prints and exits."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from torsh_distributed import __version__
from torsh_distributed.cli import environment, explain, run, store
from torsh_distributed.cli.bench import collectives, compression, network
from torsh_distributed.cli.demo import command as demo
from torsh_distributed.cli.plan import commands as plan
from torsh_distributed.errors import TorshError

app = typer.Typer(
    name="torsh",
    help="Distributed training for PyTorch: one plan from a laptop to a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", context_settings=run.CONTEXT_SETTINGS)(run.run)
app.command("train")(demo.train)
app.command("explain")(explain.explain)
app.command("env")(environment.show)
app.add_typer(plan.app, name="plan")
app.add_typer(store.app, name="store")
collectives.app.command("compression")(compression.compression)
collectives.app.command("network")(network.network)
app.add_typer(collectives.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torsh-distributed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=os.environ.get("TORSH_LOG", "WARNING").upper(), format="%(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """Entry point of `torsh`: an error of ours is one readable paragraph and exit status 1, never a traceback."""
    try:
        app()
    except TorshError as error:
        print_error(error)
        sys.exit(1)


def print_error(error: TorshError) -> None:
    """Write the error to stderr as a person should read it."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    first, *rest = str(error).splitlines()
    console.print(f"[bold red]error[/] [bold]{escape(error.code)}[/]: {escape(first)}")
    for line in rest:
        console.print(escape(line))


if __name__ == "__main__":
    main()
