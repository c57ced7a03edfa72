"""How much a plan file may hold: so little that even a malicious one is read or refused at once.

A plan is two levels of keys. The limits are far above what one needs and far below what costs time: PyYAML reads
100 KB a second, and tomllib takes time quadratic in the parts of a dotted key.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path


class MalformedError(Exception):
    """What the parser found, and where (line and column from 1) if it knows."""

    def __init__(self, reason: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = f", line {place[0]}, column {place[1]}" if place else ""


def position(text_before: str) -> tuple[int, int]:
    """Line and column, from 1, of what follows this text."""
    return text_before.count("\n") + 1, len(text_before) - (text_before.rfind("\n") + 1) + 1


MAX_BYTES = 1 << 16
"""Size of a file."""
MAX_DEPTH = 16
"""Tables and lists inside one another."""
MAX_EXPANDED_CHARS = 1 << 18
"""What a YAML document may be once its aliases are replaced by what they stand for."""
MAX_DIGITS = 400
"""Characters of a number: what a float can have before the point, and more."""

_MAX_KEY_PARTS = 64
# Possessive (`*+`) and only where a key can start: the search itself takes time linear in the text.
_PART = r"""(?:[\w-]++|"(?:\\.|[^"\\\n])*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:^|(?<=[\s\[{{,]))(?:{_PART}[ \t]*+\.[ \t]*+){{{_MAX_KEY_PARTS}}}", re.MULTILINE)


def read_limited(path: Path) -> bytes:
    """The bytes of a file that is small enough. Raises OSError, or MalformedError for what is too large or no file."""
    # Non-blocking: opening a pipe that nobody writes would wait for ever.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise MalformedError("a plan is a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise MalformedError(f"a plan has at most {MAX_BYTES // 1024} KB, and this file is larger")
    return data


def refuse_long_keys(text: str) -> None:
    """Raise MalformedError if text, in TOML, has a dotted key of very many parts."""
    found = _LONG_KEY.search(text)
    if found is not None:
        raise MalformedError(f"a key of more than {_MAX_KEY_PARTS} parts", position(text[: found.start()]))


def refuse_depth(document: object) -> None:
    """Raise MalformedError if tables and lists are inside one another too deeply."""
    level = [document]
    for _ in range(MAX_DEPTH):
        inside = [value for value in level if isinstance(value, dict | list)]
        level = [child for value in inside for child in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    if any(isinstance(value, dict | list) for value in level):
        raise MalformedError(f"nested more than {MAX_DEPTH} levels deep")
