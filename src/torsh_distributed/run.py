"""`python -m torsh_distributed.run`: the same as `torsh run`, as `python -m torch.distributed.run` is to torchrun."""

from __future__ import annotations

import os

from torsh_distributed.cli.entry_point import end_quietly_at_interrupt
from torsh_distributed.cli.error_message import errors_in_words
from torsh_distributed.cli.run.command import app
from torsh_distributed.log_level import set_log_level


def main() -> None:
    """Read the command line, run the job, exit with its code."""
    end_quietly_at_interrupt()
    with errors_in_words():
        set_log_level(os.environ, default="WARNING")
        app(prog_name="torsh run")


if __name__ == "__main__":
    main()
