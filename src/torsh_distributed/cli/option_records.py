"""Commands that take records of options instead of dozens of parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer reads it: every field of its NamedTuples, and of NamedTuples in them, is an option.

    A field is annotated and has its default as a parameter would. Names are unique over all records.
    """
    hints = get_type_hints(command, include_extras=True)
    options: list[inspect.Parameter] = []
    makers = {name: _maker(name, hints[name], options) for name in inspect.signature(command).parameters}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**{name: make(given) for name, make in makers.items()})

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what inspect looks for
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _maker(
    name: str, kind: Any, options: list[inspect.Parameter], default: Any = inspect.Parameter.empty
) -> Callable[[dict[str, Any]], Any]:
    """What makes a parameter of what was given; the options that it needs are added to `options`."""
    if not (isinstance(kind, type) and hasattr(kind, "_field_defaults")):
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        return lambda given: given[name]
    defaults = kind._field_defaults
    makers = {
        field: _maker(field, hint, options, defaults.get(field, inspect.Parameter.empty))
        for field, hint in get_type_hints(kind, include_extras=True).items()
    }
    return lambda given: kind(**{field: make(given) for field, make in makers.items()})
