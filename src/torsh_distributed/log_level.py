"""TORSH_LOG: the level of this library's messages, in the launcher and its workers; and what packages say to a log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from typing_extensions import override

from torsh_distributed.errors import ConfigurationError

VARIABLE = "TORSH_LOG"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LOGGER = "torsh_distributed"
_FORMAT = "%(levelname)s %(name)s: %(message)s"


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """Writes to stderr while the program has no logging of its own; then that has the messages."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def set_log_level(environ: Mapping[str, str], *, default: str = "") -> None:
    """Follow TORSH_LOG for the loggers of this library, or `default` without it; other loggers are the program's.

    Without both nothing changes: Python shows warnings. Raises ConfigurationError for a word that is not a level.
    """
    text = environ.get(VARIABLE, "").strip() or default
    if not text:
        return
    level = text.upper()
    if level not in LEVELS:
        raise ConfigurationError(
            f"{VARIABLE} must be one of {', '.join(LEVELS)}", hint=f"set {VARIABLE}=INFO, or unset it", TORSH_LOG=text
        )
    logger = logging.getLogger(_LOGGER)
    logger.setLevel(level)
    if not any(isinstance(handler, _FallbackHandler) for handler in logger.handlers):
        handler = _FallbackHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)


@contextmanager
def said_to_log(name: str | None) -> Iterator[list[str]]:
    """Keep what this thread says to the logger `name` (None: the root) from being shown; the list has it.

    For packages that return only that something failed and log why, at every try: it belongs into our error, once.
    """
    said: list[str] = []
    own = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        if record.thread != own:
            return True
        said.append(record.getMessage())
        return False

    logger = logging.getLogger(name)
    logger.addFilter(keep)
    try:
        yield said
    finally:
        logger.removeFilter(keep)
