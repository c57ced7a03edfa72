"""An error as a person reads it: a paragraph on stderr, without a traceback."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

from torsh_distributed.errors import IoError, TorshError
from torsh_distributed.terminal_text import neutral

_OF_A_PATH = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINVAL, errno.EIO, errno.EBUSY),
}


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Around a command: one of our errors, or about a path that the user named, is a paragraph and exit status 1."""
    try:
        yield
    except TorshError as error:
        print_error(error)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _OF_A_PATH:
            raise
        path = error.filename if error.filename2 is None else error.filename2  # None once the file is open
        told = IoError(
            f"a file or folder cannot be used: {error.strerror}",
            hint="check that it is there, of the right kind, and that you may read or write it",
            **({} if path is None else {"path": str(path)}),
        )
        print_error(told)
        sys.exit(1)


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
