"""`python -m torsh_distributed.run`: the same as `torsh run`, as `python -m torch.distributed.run` is to torchrun."""

from __future__ import annotations

import sys

import typer

from torsh_distributed.cli.run import CONTEXT_SETTINGS, run
from torsh_distributed.errors import TorshError


def main() -> None:
    """Read the command line, run the job, exit with its code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT_SETTINGS)(run)
    try:
        app(prog_name="torsh run")
    except TorshError as error:
        # Only now: the whole command line is more than a job needs.
        from torsh_distributed.cli.app import print_error

        print_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
