"""`python -m torsh_distributed.run`: the same as `torsh run`, as `python -m torch.distributed.run` is to torchrun."""

from __future__ import annotations

import sys

from torsh_distributed.cli.run import app
from torsh_distributed.errors import TorshError


def main() -> None:
    """Read the command line, run the job, exit with its code."""
    try:
        app(prog_name="torsh run")
    except TorshError as error:
        from torsh_distributed.cli.app import print_error

        print_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
