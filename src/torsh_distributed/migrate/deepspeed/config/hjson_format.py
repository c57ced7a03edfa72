"""HJSON, the format that DeepSpeed reads its configs with: JSON with comments, without quotes and commas.

Nearly all configs are plain JSON, which Python reads itself; the rest is read by the package hjson, as DeepSpeed does.
Both refuse a key given twice, and what other people may have written to keep a reader busy.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.errors import ConfigurationError, first_line, missing_extra
from torsh_distributed.plan.reading.limits import MAX_DIGITS, MalformedError, position, read_limited, refuse_depth

_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")


def parse_hjson(text: str) -> Any:
    """The value in `text`. Raises MalformedError with the line and column of what is wrong, where they are known.

    Raises FeatureNotAvailable if `text` is not JSON and the package hjson is not installed.
    """
    # Before the package looks: it reads the digits again for every comma after them, 19 s in a file of 64 KB.
    found = _LONG_NUMBER.search(text)
    if found is not None:
        raise MalformedError(f"a number of more than {MAX_DIGITS} digits", position(text[: found.start()]))
    try:
        document = _value_of(text)
    except RecursionError:
        raise MalformedError("nested too deeply") from None
    refuse_depth(document)
    return document


def _value_of(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_not_json, object_pairs_hook=_members)
    except ValueError as error:
        reason = first_line(error)
    try:
        import hjson
    except ImportError as error:
        raise missing_extra("hjson", f"this is not JSON ({reason}), and HJSON") from error
    try:
        # Text of several lines that begins on the first line takes the package past the start: give it a line before.
        return hjson.loads("\n" + text.replace("\r\n", "\n"), object_pairs_hook=_members)
    except hjson.HjsonDecodeError as error:
        raise MalformedError(str(error).rpartition(": line ")[0], (error.lineno - 1, error.colno)) from None
    except (IndexError, OverflowError):  # past the end of a comment; a number beyond all floats
        raise MalformedError("a comment does not end, or a number is too large") from None


def _not_json(name: str) -> Any:
    """NaN and Infinity: Python's reader takes them for numbers, JSON and HJSON do not."""
    raise ValueError(f"{name} is not JSON")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise MalformedError(f"the key {name} is given twice")
        found[name] = value
    return found


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
