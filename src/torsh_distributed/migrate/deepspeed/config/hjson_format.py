"""HJSON, the format that DeepSpeed reads its configs with: JSON with comments, without ceremony.

Comments are `#`, `//` and `/* */`; quotes around keys and text, and commas at the end of a line, may be left out; text
of several lines stands between three single quotes. All JSON is HJSON. A key given twice is refused.
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.reading.limits import MAX_DEPTH, MAX_DIGITS, read_limited
from torsh_distributed.plan.reading.malformed import MalformedError, position

_SPACE = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
_BARE_KEY = re.compile(r"[^\s{}\[\],:\"'#][^\s{}\[\],:]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CONSTANTS = {"true": True, "false": False, "null": None}


def parse_hjson(text: str) -> Any:
    """The value in `text`. Raises MalformedError with the line and column of what is wrong."""
    parser = _HjsonParser(text.replace("\r\n", "\n"))
    parser.skip_space()
    # The braces around the whole document may be left out too.
    has_braces = parser.peek() in ("{", "[") or not parser.is_at_key()
    value = parser.value(0) if has_braces else parser.members("", 0)
    parser.skip_space()
    if not parser.is_at_end:
        raise parser.malformed(f"the document ends before {parser.rest_of_line()!r}")
    return value


class _HjsonParser:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._text)

    def peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def rest_of_line(self) -> str:
        return self._text[self._at :].split("\n", 1)[0][:40]

    def malformed(self, reason: str) -> MalformedError:
        return MalformedError(reason, position(self._text[: self._at]))

    def skip_space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        if self._text.startswith("/*", self._at):
            raise self.malformed("a comment does not end")

    def is_at_key(self) -> bool:
        start = self._at
        try:
            self._key()
            self.skip_space()
            return self.peek() == ":"
        except MalformedError:
            return False
        finally:
            self._at = start

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.malformed("nested too deeply")
        first = self.peek()
        if first == "{":
            self._at += 1
            return self.members("}", depth + 1)
        if first == "[":
            self._at += 1
            return self._elements(depth + 1)
        if self._text.startswith("'''", self._at):
            return self._multiline()
        if first in ('"', "'"):
            return self._quoted(first)
        return self._bare_value()

    def members(self, end: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._has_another(end, "an object"):
            start = self._at
            name = self._key()
            if name in found:
                self._at = start
                raise self.malformed(f"the key {name} is given twice")
            self.skip_space()
            if self.peek() != ":":
                raise self.malformed(f"the key {name} is not followed by a colon")
            self._at += 1
            self.skip_space()
            found[name] = self.value(depth)
            self._skip_comma()
        return found

    def _elements(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while self._has_another("]", "a list"):
            found.append(self.value(depth))
            self._skip_comma()
        return found

    def _has_another(self, end: str, what: str) -> bool:
        self.skip_space()
        if self.is_at_end:
            if end:
                raise self.malformed(f"{what} does not end")
            return False
        if end and self.peek() == end:
            self._at += 1
            return False
        return True

    def _skip_comma(self) -> None:
        self.skip_space()
        if self.peek() == ",":
            self._at += 1

    def _key(self) -> str:
        if self.peek() in ('"', "'"):
            return self._quoted(self.peek())
        found = _BARE_KEY.match(self._text, self._at)
        if found is None:
            raise self.malformed(f"a key is expected before {self.rest_of_line()!r}")
        self._at = found.end()
        return found.group()

    def _quoted(self, quote: str) -> str:
        start = self._at
        parts: list[str] = []
        self._at += 1
        while True:
            here = self.peek()
            if here in ("", "\n"):
                self._at = start
                raise self.malformed("text in quotes does not end")
            self._at += 1
            if here == quote:
                return "".join(parts)
            parts.append(self._escaped() if here == "\\" else here)

    def _escaped(self) -> str:
        kind = self.peek()
        self._at += 1
        if kind != "u":
            if kind not in _ESCAPES:
                raise self.malformed(f"\\{kind} is not an escape")
            return _ESCAPES[kind]
        code = self._hexadecimal()
        is_first_half = 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._at)
        if is_first_half:  # of a character beyond 16 bits, which JSON writes as two
            self._at += 2
            second = self._hexadecimal()
            return (code.to_bytes(2, "little") + second.to_bytes(2, "little")).decode("utf-16-le", "surrogatepass")
        return chr(code)

    def _hexadecimal(self) -> int:
        digits = self._text[self._at : self._at + 4]
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise self.malformed("\\u is followed by four hexadecimal digits")
        self._at += 4
        return int(digits, 16)

    def _multiline(self) -> str:
        end = self._text.find("'''", self._at + 3)
        if end < 0:
            raise self.malformed("text of several lines does not end")
        indent = self._at - (self._text.rfind("\n", 0, self._at) + 1)
        lines = self._text[self._at + 3 : end].split("\n")
        self._at = end + 3
        if not lines[0].strip():
            lines = lines[1:]
        if lines and not lines[-1].strip():
            lines = lines[:-1]
        return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)

    def _bare_value(self) -> Any:
        """A number or constant up to its end, or text up to the end of the line."""
        line = self._text[self._at :].split("\n", 1)[0]
        short = re.split(r"[,\]}]|#|//|/\*", line, maxsplit=1)[0].strip()
        if short in _CONSTANTS:
            self._at += line.index(short) + len(short)
            return _CONSTANTS[short]
        if _NUMBER.fullmatch(short):
            if len(short) > MAX_DIGITS:
                raise self.malformed(f"a number of more than {MAX_DIGITS} digits")
            self._at += line.index(short) + len(short)
            return float(short) if any(mark in short for mark in ".eE") else int(short)
        if not line.strip() or line[0] in "{}[],:":
            raise self.malformed(f"a value is expected before {self.rest_of_line()!r}")
        self._at += len(line)
        return line.strip()


ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


def read_config(source: ConfigSource) -> tuple[dict[str, Any], str]:
    """The config as a dict of its own, and what errors call it. Raises ConfigurationError if it cannot be read."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), "the DeepSpeed config"
    name = os.fspath(source)
    path = Path(name)
    try:
        if path.is_file():
            return _parsed(read_limited(path), name), name
    except OSError as error:
        raise ConfigurationError(f"the DeepSpeed config {name} cannot be read: {error.strerror}") from error
    except MalformedError as error:
        raise ConfigurationError(f"the DeepSpeed config {name} cannot be read: {error.reason}") from None
    decoded = _decoded(name)
    if decoded is None:
        raise ConfigurationError(
            f"there is no DeepSpeed config {name[:200]}",
            hint="give a path to a JSON or HJSON file, a dict, or a config in urlsafe base64",
        )
    return _parsed(decoded, "the DeepSpeed config in base64"), "the DeepSpeed config in base64"


def _decoded(text: str) -> bytes | None:
    try:
        raw = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError):
        return None
    return raw if raw.strip()[:1] == b"{" else None


def _parsed(raw: bytes, name: str) -> dict[str, Any]:
    try:
        document = parse_hjson(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name}: not UTF-8: {error.reason}") from error
    except MalformedError as error:
        raise ConfigurationError(
            f"{name}{error.where}: not valid HJSON: {error.reason}", hint="fix the file there"
        ) from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{name}: a DeepSpeed config is an object of keys", hint='it begins with "{"')
    return document
