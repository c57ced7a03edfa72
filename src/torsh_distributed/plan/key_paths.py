"""Key paths: from `mesh.dp` to the field that it names, and back."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo


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


def sections_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Name to model of every section of a plan."""
    found = ((name, section_of(field)) for name, field in model.model_fields.items())
    return {name: section for name, section in found if section is not None}


def keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Every full key of a plan, in the order of its sections."""
    return tuple(f"{name}.{key}" for name, section in sections_of(model).items() for key in section.model_fields)
