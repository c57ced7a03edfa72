"""What every part of a plan shares: frozen, strict, documented, replaceable."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One part of a plan: a frozen model that refuses unknown keys.

    The text under each field is its documentation: the reference page and `torsh plan schema` are made from it.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**self.model_dump(), **changes})
