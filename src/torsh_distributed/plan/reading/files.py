"""Read and write plans as TOML, JSON or YAML; say where a file is malformed; write atomically."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from torsh_distributed.errors import ConfigurationError, IoError
from torsh_distributed.plan.reading.limits import (
    MAX_DIGITS,
    MalformedError,
    position,
    read_limited,
    refuse_depth,
    refuse_long_keys,
)

Document = dict[str, Any]


def read(path: Path) -> Document:
    """The content of a plan file. Raises ConfigurationError naming the file, and line and column if malformed."""
    parse, _ = _format_of(path)
    try:
        document = parse(_decode(read_limited(path)))
        refuse_depth(document)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no plan file {path}", hint="check the path; it is relative to the working directory"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the plan file {path} cannot be read: {error.strerror}",
            hint="check that it is a file and that this user may read it",
        ) from error
    except MalformedError as error:
        raise ConfigurationError(
            f"{path}{error.where}: not valid {path.suffix[1:].upper()}: {error.reason}",
            hint="fix the file there, or start from a plan in examples/plans",
        ) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigurationError(
            f"{path}: a plan is a table of sections, but this file holds {_kind_of(document)}",
            hint="write sections such as [mesh] and [training] with keys under them",
        )
    return document


def write(path: Path, document: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a plan file in the format of its suffix, whole or not at all. Keys without a value are left out."""
    _, render = _format_of(path)
    kept = {
        section: {key: value for key, value in keys.items() if value is not None} for section, keys in document.items()
    }
    write_atomically(path, render(kept))


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by `text` in one step: a reader sees the old content or the new, also after a crash."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode())
                file.flush()
                # mkstemp creates 0600; a plan is not secret, so it gets the mode that the umask would give it.
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise IoError(
            f"{path} cannot be written: {error.strerror}",
            hint="check that the directory exists, has space, and may be written by this user",
            errno=error.errno,
        ) from error


def _umask() -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"^Umask:\s*([0-7]+)", text, re.MULTILINE)
    return int(found.group(1), 8) if found else 0o077


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = position(raw[: error.start].decode("utf-8", errors="replace"))
        raise MalformedError(f"byte 0x{raw[error.start]:02x} is not UTF-8", place) from error


def parse_toml(text: str) -> dict[str, Any]:
    """The document in `text`; raises MalformedError."""
    refuse_long_keys(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, where = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+), column (\d+)\)", where)
        # Without line and column the message says "end of document".
        place = (int(found.group(1)), int(found.group(2))) if found else position(text)
        raise MalformedError(reason or str(error), place) from error
    except RecursionError as error:
        raise MalformedError("nested too deeply") from error
    except ValueError as error:  # Python reads no number of thousands of digits
        raise MalformedError(str(error)) from error


def _parse_json(text: str) -> object:
    try:
        return json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_int=_short_int
        )
    except json.JSONDecodeError as error:
        raise MalformedError(error.msg, (error.lineno, error.colno)) from error
    except RecursionError as error:
        raise MalformedError("nested too deeply") from error


def _short_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise MalformedError(f"a number of more than {MAX_DIGITS} digits")
    return int(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise MalformedError(f"the key {twice} is given twice")
    return found


def _refuse_constant(name: str) -> object:
    raise MalformedError(f"{name} is not a JSON number")


def _parse_yaml(text: str) -> object:
    from torsh_distributed.plan.reading import yaml_format  # here: a plan in TOML does not wait for PyYAML

    return yaml_format.parse(text)


def _render_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _render_yaml(document: Mapping[str, Any]) -> str:
    from torsh_distributed.plan.reading import yaml_format

    return yaml_format.render(document)


_FORMATS: dict[str, tuple[Callable[[str], object], Callable[[Mapping[str, Any]], str]]] = {
    ".toml": (parse_toml, tomli_w.dumps),
    ".json": (_parse_json, _render_json),
    ".yaml": (_parse_yaml, _render_yaml),
    ".yml": (_parse_yaml, _render_yaml),
}


def _format_of(path: Path) -> tuple[Callable[[str], object], Callable[[Mapping[str, Any]], str]]:
    try:
        return _FORMATS[path.suffix.lower()]
    except KeyError:
        known = ", ".join(_FORMATS)
        raise ConfigurationError(
            f"{path}: a plan's format follows from its suffix, and {path.suffix or 'none'} is not one of {known}",
            hint="rename the file, for instance to plan.toml",
        ) from None


def _kind_of(document: object) -> str:
    return "a list" if isinstance(document, list) else f"the value {document!r}"
