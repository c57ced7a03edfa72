"""What a field of a plan may hold, in words: for error messages and the reference page."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo


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
