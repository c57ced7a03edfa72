"""Random valid plans, drawn from the models themselves: a new field is covered the day it is added."""

from __future__ import annotations

import types
import typing
from typing import Any

import annotated_types
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import MeshConfig, Plan
from torsh_distributed.plan.problems import sections_of
from torsh_distributed.plan.sections.compress import METHODS
from torsh_distributed.plan.sections.distributed import BACKENDS
from torsh_distributed.plan.sections.mesh import FILL

SPECIAL = {
    "distributed.backend": st.sampled_from(["auto", *BACKENDS, "cpu:gloo,cuda:nccl"]),
    "compress.method": st.sampled_from([*METHODS, "topk:0.01", "powersgd:2", "nbit:3"]),
    # Small: tests build schedules of them.
    "pipeline.num_microbatches": st.integers(1, 20),
    "pipeline.stages_per_rank": st.integers(1, 3),
}
DEGREES = st.sampled_from([FILL, 1, 1, 2, 3, 8])


def values_of(key: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    """What the field may hold, taken alone."""
    if key in SPECIAL:
        return SPECIAL[key]
    if key.startswith("mesh."):
        return DEGREES
    return _values(field.annotation, field.metadata)


def _values(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    bounds: dict[str, Any] = {}
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=bound) | annotated_types.Gt(gt=bound):
                bounds["min_value"] = bound
            case annotated_types.Le(le=bound):
                bounds["max_value"] = bound
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (types.UnionType, typing.Union):
        return st.none() | _values(arguments[0], metadata)
    if origin is tuple:
        return st.lists(st.text(), max_size=3).map(tuple)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(**bounds)
    if annotation is float:
        above = any(isinstance(item, annotated_types.Gt) for item in metadata)
        return st.floats(allow_nan=False, allow_infinity=False, exclude_min=above, **bounds)
    assert annotation is str, f"no values for {annotation}: add them here"
    return st.text(min_size=1)


@st.composite
def sections(draw: st.DrawFn, name: str, model: type[BaseModel]) -> BaseModel:
    """A section with some keys changed; its defaults where those do not go together."""
    names = draw(st.sets(st.sampled_from(list(model.model_fields))))
    values = {key: draw(values_of(f"{name}.{key}", model.model_fields[key])) for key in sorted(names)}
    try:
        return model(**values)
    except ConfigurationError:
        return model()


@st.composite
def meshes(draw: st.DrawFn, world_size: int) -> MeshConfig:
    """A mesh that fills the world: every prime factor of its size on some axis, so a degree above 1 is common."""
    degrees = dict.fromkeys(MeshConfig.model_fields, 1)
    rest = world_size
    while rest > 1:
        factor = next(number for number in range(2, rest + 1) if rest % number == 0)
        degrees[draw(st.sampled_from(list(degrees)))] *= factor
        rest //= factor
    return MeshConfig(**degrees)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A valid plan with anything set in some of its sections."""
    models = sections_of(Plan)
    changed = draw(st.sets(st.sampled_from(list(models)), max_size=5))
    drawn = {name: draw(sections(name, models[name])) for name in sorted(changed)}
    try:
        return Plan(**drawn)
    except ConfigurationError:  # sections that do not go together
        return Plan(**{name: section for name, section in drawn.items() if name not in ("fsdp", "expert", "mesh")})
