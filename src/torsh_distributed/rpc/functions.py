"""`async_execution`, under the name that torch gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torsh_distributed.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Says that a function returns a future, whose result is the reply. Nothing has to be done for it here."""
    if not callable(getattr(fn, "__func__", fn)):
        raise InvalidArgument("async_execution is for functions", type=type(fn).__name__)
    return fn
