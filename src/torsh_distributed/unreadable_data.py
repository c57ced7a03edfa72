"""Data that somebody else may have written: whatever goes wrong while it is taken apart becomes one of our errors.

Names, shapes, offsets and sizes are checked where they are read. This is for the rest: a value of another type deep
inside a state has no line of our code that expects it, and its reader should not meet a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torsh_distributed.errors import TorshError


@contextmanager
def unreadable_as(kind: type[TorshError], message: str, *, hint: str | None = None, **context: Any) -> Iterator[None]:
    """Raise `kind` with the message and the reason if the block fails; our own errors pass."""
    try:
        yield
    except TorshError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU: not the data's fault
            raise
        raise kind(f"{message}: {reason_of(error)}", hint=hint, **context) from error


def reason_of(error: BaseException) -> str:
    """The first line of what an exception says, with its type where the text alone says little."""
    text = (str(error).splitlines() or [""])[0][:300]
    is_telling = isinstance(error, TorshError) or type(error) is ValueError or (isinstance(error, OSError) and text)
    return text if is_telling else f"{type(error).__name__} {text}".strip()
