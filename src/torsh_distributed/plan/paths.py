"""Key paths: from `mesh.dp` to the field that it names, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from torsh_distributed.plan.base import Section


def section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The model of a field that holds a section; None for a plain value."""
    kind = field.annotation if field is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def section_at(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel]:
    """The innermost section that `path` leads into."""
    for name in path:
        model = section_of(model.model_fields.get(name)) or model
    return model


def field_at(path: Sequence[str], model: type[BaseModel]) -> FieldInfo | None:
    """The field that `path` leads to, if there is one."""
    return section_at(path[:-1], model).model_fields.get(path[-1]) if path else None


def keys_of(model: type[Section]) -> tuple[str, ...]:
    """Every full key of a plan, in the order of its sections."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        section = section_of(field)
        found += [f"{name}.{key}" for key in section.model_fields] if section else []
    return tuple(found)
