"""Read and write plans as TOML, JSON or YAML; say where a file is malformed; write atomically."""

from __future__ import annotations

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
import yaml
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, IoError

Document = dict[str, Any]


class _MalformedError(Exception):
    """What the parser found, and where (line and column from 1) if it knows."""

    def __init__(self, reason: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = f", line {place[0]}, column {place[1]}" if place else ""


# PyYAML follows YAML 1.1, where 1e-3 is text: a learning rate would arrive as a string. Both classes below read
# and quote numbers as YAML 1.2 does. They can go once PyYAML speaks 1.2.
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$")


class _YamlLoader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice instead of keeping the last."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _YamlDumper(yaml.SafeDumper):
    """Safe dumping that `_YamlLoader` reads back exactly: same numbers, and text with line breaks escaped."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Double quotes escape what plain and single-quoted text would lose, such as U+0085."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_YamlDumper.add_representer(str, _YamlDumper.represent_text)
for _kind in (_YamlLoader, _YamlDumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read(path: Path) -> Document:
    """The content of a plan file. Raises ConfigurationError naming the file, and line and column if malformed."""
    parse, _ = _format_of(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no plan file {path}", hint="check the path; it is relative to the working directory"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the plan file {path} cannot be read: {error.strerror}",
            hint="check that it is a file and that this user may read it",
        ) from error
    try:
        document = parse(_decode(raw))
    except _MalformedError as error:
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
        place = _position(raw[: error.start].decode("utf-8", errors="replace"))
        raise _MalformedError(f"byte 0x{raw[error.start]:02x} is not UTF-8", place) from error


def _position(text_before: str) -> tuple[int, int]:
    return text_before.count("\n") + 1, len(text_before) - (text_before.rfind("\n") + 1) + 1


def _parse_toml(text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, where = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+), column (\d+)\)", where)
        # Without line and column the message says "end of document".
        place = (int(found.group(1)), int(found.group(2))) if found else _position(text)
        raise _MalformedError(reason or str(error), place) from error
    except RecursionError as error:
        raise _MalformedError("nested too deeply") from error


def _parse_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _MalformedError(error.msg, (error.lineno, error.colno)) from error
    except RecursionError as error:
        raise _MalformedError("nested too deeply") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _MalformedError(f"the key {twice} is given twice")
    return found


def _refuse_constant(name: str) -> object:
    raise _MalformedError(f"{name} is not a JSON number")


def _parse_yaml(text: str) -> object:
    try:
        return yaml.load(text, Loader=_YamlLoader)  # noqa: S506  # _YamlLoader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = (mark.line + 1, mark.column + 1) if mark is not None else None
        raise _MalformedError(error.problem or "malformed", place) from error
    except yaml.reader.ReaderError as error:
        raise _MalformedError(error.reason, _position(text[: error.position])) from error
    except RecursionError as error:
        raise _MalformedError("nested too deeply") from error
    except ValueError as error:  # for example an impossible date
        raise _MalformedError(str(error)) from error


def _render_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _render_yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(document, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)


_FORMATS: dict[str, tuple[Callable[[str], object], Callable[[Mapping[str, Any]], str]]] = {
    ".toml": (_parse_toml, tomli_w.dumps),
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
