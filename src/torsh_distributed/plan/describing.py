"""A plan in words: allowed values, explanations, and the generated pages.

The text under each field of a section, read from the source when somebody asks.
Why not pydantic's `use_attribute_docstrings`: it parses every section's source at import, a quarter of the time of a
command that only checks a plan.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo
from typing_extensions import override


@dataclasses.dataclass(frozen=True)
class AllowedValues:
    """Text in a field's annotation, if the type alone does not say what is allowed."""

    text: str


_NAMES: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def describe(field: FieldInfo) -> str:
    """What the field accepts, as the end of a sentence: "an integer, at least 1"."""
    for item in field.metadata:
        if isinstance(item, AllowedValues):
            return item.text
    return ", ".join([_type_in_words(field.annotation), *_bounds_in_words(field.metadata)])


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words a field may hold, if they are a closed set; else empty."""
    if typing.get_origin(field.annotation) is typing.Literal:
        return tuple(str(word) for word in typing.get_args(field.annotation))
    return ()


def _type_in_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(word) for word in arguments)
    if origin is tuple:
        return f"a list of {_type_in_words(arguments[0])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_in_words(part) for part in arguments if part is not type(None)) + " (left out: none)"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds_in_words(metadata: list[Any]) -> list[str]:
    words: list[str] = []
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=bound):
                words.append(f"at least {bound}")
            case annotated_types.Gt(gt=bound):
                words.append(f"above {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"below {bound}")
            case annotated_types.MinLen(min_length=1):
                words.append("not empty")
    return words


@dataclasses.dataclass(frozen=True)
class ExplainedKey:
    """One key of a plan."""

    key: str
    value: object
    source: str
    """argument, command line, environment VARIABLE, file PATH, or default."""
    status: str
    """honoured, or off by another key."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The rows of a plan; printed, a table of them."""

    rows: tuple[ExplainedKey, ...]

    def __iter__(self) -> Iterator[ExplainedKey]:
        return iter(self.rows)

    def __getitem__(self, key: str) -> ExplainedKey:
        return {row.key: row for row in self.rows}[key]

    @override
    def __str__(self) -> str:
        cells = [(row.key, show(row.value), row.source, row.status) for row in self.rows]
        widths = [max(len(cell[column]) for cell in cells) for column in range(4)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip() for cell in cells
        )


def show(value: object) -> str:
    """A value as a plan file would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)


@cache
def field_texts(section: type) -> Mapping[str, str]:
    """Field name to the string below its definition, those of base classes included."""
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if "__annotations__" not in vars(kind) or kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef), "the source of a class is its definition"
        for field, text in pairwise(definition.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if (
                isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                texts[field.target.id] = inspect.cleandoc(text.value.value)
    return texts
