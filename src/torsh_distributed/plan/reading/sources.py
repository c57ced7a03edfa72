"""Where values come from: file, environment, command line, arguments; the later wins, and each keeps its source."""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torsh_distributed.plan.key_paths import field_at, keys_of
from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.reading import aliases, files

if TYPE_CHECKING:
    from torsh_distributed.plan.section import Section

_log = logging.getLogger(__name__)

PREFIX = "TORSH_PLAN__"
"""Start of the environment variables that set a key: TORSH_PLAN__MESH__DP=2 is mesh.dp = 2."""


@dataclasses.dataclass
class Layer:
    """Values from one place by section, the source of each key, and what was wrong already while reading."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def put(self, section: str, key: str, value: Any, source: str) -> None:
        """Set one key."""
        keys = self.values.setdefault(section, {})
        if isinstance(keys, dict):  # else the whole section is wrong, which validation reports
            keys[key] = value
        self.sources[f"{section}.{key}"] = source


def merge(layers: Iterable[Layer]) -> Layer:
    """One layer in which the later of `layers` win, key by key."""
    merged = Layer()
    for layer in layers:
        for section, keys in layer.values.items():
            below = merged.values.get(section)
            merged.values[section] = {**below, **keys} if isinstance(below, dict) and isinstance(keys, dict) else keys
        merged.sources |= layer.sources
        merged.problems += layer.problems
    return merged


def file_layer(path: Path, model: type[Section]) -> Layer:
    """The values of a plan file."""
    return document_layer(files.read(path), model, source=f"file {path}")


def document_layer(document: Mapping[Any, Any], model: type[Section], *, source: str) -> Layer:
    """The values of a parsed file: sections of keys, old spellings replaced with a notice in the log."""
    layer = Layer()
    known = frozenset(keys_of(model))
    given = {f"{section}.{key}" for section, keys in document.items() if isinstance(keys, dict) for key in keys}
    for section, keys in document.items():
        if keys is None and section in model.model_fields:
            continue  # in YAML, a section with nothing under it
        if not isinstance(keys, dict):
            layer.values[str(section)] = keys
            continue
        layer.values.setdefault(str(section), {})
        for key, value in keys.items():
            full = f"{section}.{key}"
            meant = aliases.expand(full, value, known=known)
            for new, converted in (meant or {full: value}).items():
                if meant and (new in given or new in layer.sources):
                    layer.problems.append(aliases.twice(full, new))
                    continue
                home, _, name = new.partition(".")
                layer.put(home, name, converted, f"{source}, as {full}" if meant else source)
            if meant:
                _log.warning("%s: %s is accepted for %s; please write the latter", source, full, " and ".join(meant))
    return layer


def environment_layer(environ: Mapping[str, str], model: type[Section]) -> Layer:
    """The keys set by variables TORSH_PLAN__SECTION__KEY."""
    layer = Layer()
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            path = variable.removeprefix(PREFIX).lower().split("__")
            _put_text(layer, path, environ[variable], model, source=f"environment {variable}")
    return layer


def override_layer(assignments: Iterable[str], model: type[Section]) -> Layer:
    """The keys set on a command line, each as `section.key=value`."""
    layer = Layer()
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        _put_text(layer, key.strip().split("."), text.strip(), model, source="command line")
    return layer


def _put_text(layer: Layer, path: list[str], text: str, model: type[Section], *, source: str) -> None:
    if len(path) != 2 or not all(path):
        layer.problems.append(
            Problem(
                ".".join(path),
                f"{source}: {'.'.join(path) or 'nothing'} does not name a key",
                f"write section and key: mesh.dp=2 on the command line, {PREFIX}MESH__DP=2 in the environment",
            )
        )
        return
    layer.put(path[0], path[1], _value_of(text, path, model), source)


def _value_of(text: str, path: list[str], model: type[Section]) -> Any:
    """`text` as TOML would read it, where the key wants more than text; what is not TOML stays text."""
    field = field_at(path, model)
    if field is None or field.annotation not in (bool, int, float, int | None, float | None, tuple[str, ...]):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
