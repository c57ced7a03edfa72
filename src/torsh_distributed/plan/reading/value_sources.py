"""Where values come from: file, environment, command line. Later ones win, and each key remembers its source."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torsh_distributed.deprecation import notice
from torsh_distributed.plan.problems import Problem, field_at, keys_of
from torsh_distributed.plan.reading import aliases, files
from torsh_distributed.plan.reading.limits import MalformedError

if TYPE_CHECKING:
    from torsh_distributed.plan.section import Section

_log = logging.getLogger(__name__)

PREFIX = "TORSH_PLAN__"
"""Start of the environment variables that set a key: TORSH_PLAN__MESH__DP=2 is mesh.dp = 2."""


@dataclasses.dataclass
class SourceValues:
    """Values from one place by section, the source of each key, and the problems found while reading."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def put(self, section: str, key: str, value: Any, source: str) -> None:
        """Set one key."""
        keys = self.values.setdefault(section, {})
        if isinstance(keys, dict):  # else the whole section is wrong, which validation reports
            keys[key] = value
        self.sources[f"{section}.{key}"] = source


def merge(sources: Iterable[SourceValues]) -> SourceValues:
    """All `sources` as one, in which later ones win, key by key."""
    merged = SourceValues()
    for one in sources:
        for section, keys in one.values.items():
            below = merged.values.get(section)
            merged.values[section] = {**below, **keys} if isinstance(below, dict) and isinstance(keys, dict) else keys
        merged.sources |= one.sources
        merged.problems += one.problems
    return merged


def values_from_file(path: Path, model: type[Section]) -> SourceValues:
    """The values of a plan file."""
    return values_from_document(files.read(path), model, source=f"file {path}")


def values_from_document(document: Mapping[Any, Any], model: type[Section], *, source: str) -> SourceValues:
    """The values of a parsed file: sections of keys, old spellings replaced with a notice in the log."""
    found = SourceValues()
    known = frozenset(keys_of(model))
    given = {f"{section}.{key}" for section, keys in document.items() if isinstance(keys, dict) for key in keys}
    for section, keys in document.items():
        if keys is None and section in model.model_fields:
            continue  # an empty section in YAML
        if not isinstance(keys, dict):
            found.values[str(section)] = keys
            continue
        found.values.setdefault(str(section), {})
        for key, value in keys.items():
            full = f"{section}.{key}"
            meant = aliases.expand(full, value, known=known)
            for new, converted in (meant or {full: value}).items():
                if meant and (new in given or new in found.sources):
                    found.problems.append(aliases.twice(full, new))
                    continue
                home, _, name = new.partition(".")
                found.put(home, name, converted, f"{source}, as {full}" if meant else source)
            if meant:
                _log.warning("%s: %s", source, notice("plan keys", full, " and ".join(meant)))
    return found


def values_from_environment(environ: Mapping[str, str], model: type[Section]) -> SourceValues:
    """The keys set by variables TORSH_PLAN__SECTION__KEY."""
    found = SourceValues()
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            path = variable.removeprefix(PREFIX).lower().split("__")
            _put_text(found, path, environ[variable], model, source=f"environment {variable}")
    return found


def values_from_command_line(assignments: Iterable[str], model: type[Section]) -> SourceValues:
    """The keys set on a command line, each as `section.key=value`."""
    found = SourceValues()
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        _put_text(found, key.strip().split("."), text.strip(), model, source="command line")
    return found


def _put_text(found: SourceValues, path: list[str], text: str, model: type[Section], *, source: str) -> None:
    if len(path) != 2 or not all(path):
        found.problems.append(
            Problem(
                ".".join(path),
                f"{source}: {'.'.join(path) or 'nothing'} does not name a key",
                f"write section and key: mesh.dp=2 on the command line, {PREFIX}MESH__DP=2 in the environment",
            )
        )
        return
    found.put(path[0], path[1], _value_of(text, path, model), source)


def _value_of(text: str, path: list[str], model: type[Section]) -> Any:
    """`text` as TOML would read it, if the key takes more than text; what is not TOML stays text."""
    field = field_at(path, model)
    if field is None or field.annotation not in (bool, int, float, int | None, float | None, tuple[str, ...]):
        return text
    try:
        parsed = files.parse_toml(f"value = {text}")
    except MalformedError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
