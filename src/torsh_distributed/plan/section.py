"""What every part of a plan shares: frozen, strict, documented, replaceable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import override

from torsh_distributed.plan.describing import field_texts
from torsh_distributed.plan.problems import FOUND, Problem, configuration_error, problems_of

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

Words = Annotated[tuple[str, ...], Field(strict=False)]
"""A list of text: files give a list, the plan keeps a tuple."""


class Section(BaseModel):
    """One part of a plan: a frozen model that refuses unknown keys, wrong types and impossible values.

    The text under each field is its documentation: the reference page and `torsh plan schema` are made from it.
    Types are strict (`"2"` is not 2, 1 is not true), so a typing slip in a file does not pass as a value.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            kind = type(self)
            raise configuration_error(problems_of(error, kind), where=kind.__name__) from None

    # Tells pydantic that this constructor is still its own: it then validates a section inside a plan in place, and
    # problems keep their key path. Without the mark they would arrive as one opaque ValueError.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # a mark pydantic reads, not in its stubs

    def find_problems(self) -> Iterator[Problem]:
        """What types and ranges cannot express, such as values that exclude each other. Sections override this."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_what_does_not_work(self) -> Self:
        found = list(self.find_problems())
        if found:
            raise PydanticCustomError(FOUND, "found by find_problems", {"problems": found})
        return self

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})

    @classmethod
    @override
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """The schema of the section, with the text under each field as its description."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_texts(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return schema
