"""Values of torch's arguments as words: enums, dtypes, classes and policies, given as objects or as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

FORMATS = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}
"""Names of dtypes, and the formats of a plan."""


def word(value: Any) -> str:
    """The last part of a name: of an enum's member, a dtype, a class, a function, or text such as `A.B`."""
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(name if isinstance(name, str) else value).rpartition(".")[2]


def format_of(value: Any) -> str | None:
    """The format of a plan for a dtype; None if a plan has none."""
    return FORMATS.get(word(value).lower())


def parts_of(value: Any) -> dict[str, Any]:
    """The fields of a policy such as MixedPrecision, given as an object or as a table."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return (
        {name: one for name, one in vars(value).items() if not name.startswith("_")}
        if hasattr(value, "__dict__")
        else {}
    )
