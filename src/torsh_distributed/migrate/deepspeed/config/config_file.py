"""Where a DeepSpeed config comes from: a file, a dict, or the base64 that launchers pass on a command line."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config.hjson_format import parse_hjson
from torsh_distributed.plan.reading.limits import read_limited
from torsh_distributed.plan.reading.malformed import MalformedError

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
