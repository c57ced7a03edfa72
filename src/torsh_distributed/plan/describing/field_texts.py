"""The text under each field of a section, read from the source when somebody asks.

Why not pydantic's `use_attribute_docstrings`: it parses every section's source at import, a quarter of the time of a
command that only checks a plan.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise


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
