"""An error of ours as a person reads it: a paragraph on stderr, without a traceback."""

from __future__ import annotations

from torsh_distributed.errors import TorshError
from torsh_distributed.terminal_text import neutral


def print_error(error: TorshError) -> None:
    """Write the error to stderr for people."""
    # Imported only when needed: most commands print no error.
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    first, *rest = neutral(str(error)).split("\n")
    console.print(f"[bold red]error[/] [bold]{escape(error.code)}[/]: {escape(first)}")
    for line in rest:
        console.print(escape(line))
