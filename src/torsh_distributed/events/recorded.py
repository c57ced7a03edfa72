"""Events back from the lines of their files: what a line says is checked against the fields of its kind."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.events.types import Event, event_types

_MOST = 2**63 - 1
_LAST_TIME = 253_402_300_799.0
"""The last second of the year 9999: what Python can show as a date."""


def events_in(path: Path) -> Iterator[Event]:
    """The events of a file; other lines, such as one that a crash cut off, are skipped."""
    if not path.is_file():  # a pipe would be waited for
        return
    with path.open("rb") as lines:
        for line in lines:
            event = event_of(record_in(line))
            if event is not None:
                yield event


def record_in(line: bytes) -> Any:
    """The JSON value of a line; None if it is not one."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def event_of(record: Any) -> Event | None:
    """The event of a line of a file; None if this version does not know it, or a value does not fit its field."""
    if not isinstance(record, Mapping):
        return None
    kind = event_types().get(str(record.get("type")))
    if kind is None:
        return None
    fields = _annotations(kind.kind)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name in fields
    }
    if not is_time(given.get("time")) or not all(_fits(name, value, fields[name]) for name, value in given.items()):
        return None
    try:
        return kind(**given)
    except TypeError:  # a field is missing
        return None


def is_time(value: Any) -> bool:
    """Whether a value is a time that can be computed with and shown."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LAST_TIME


@functools.cache
def _annotations(kind: str) -> dict[str, str]:
    return {field.name: str(field.type) for field in dataclasses.fields(event_types()[kind])}


def _fits(name: str, value: Any, annotation: str) -> bool:
    """Whether a value may stand where the field has this annotation."""
    if value is None:
        return "None" in annotation
    if isinstance(value, tuple):
        return "tuple" in annotation and all(_is_entry(one, annotation) for one in value)
    if isinstance(value, Mapping):
        return "dict[str, " in annotation and all(_is_number(one, annotation) for one in value.values())
    if "tuple[" in annotation or "dict[" in annotation:
        return False  # one number is not a row of numbers
    if isinstance(value, bool):
        return "bool" in annotation
    if isinstance(value, str):
        return any(one in annotation for one in ("str", "Phase", "Status", "Literal["))
    if isinstance(value, int):
        return abs(value) <= _MOST and ("int" in annotation or "float" in annotation)
    if isinstance(value, float):
        # A loss may be nan; a duration may not.
        return "float" in annotation and (math.isfinite(value) or not name.endswith("_s"))
    return False


def _is_number(value: Any, annotation: str) -> bool:
    """Whether a value may stand in a dict of such numbers; a figure may be nan."""
    if isinstance(value, float):
        return "float" in annotation
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST


def _is_entry(value: Any, annotation: str) -> bool:
    if isinstance(value, list):
        return "tuple[tuple" in annotation and all(_is_entry(one, annotation) for one in value)
    is_number = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST
    return isinstance(value, str) if "str" in annotation else is_number
