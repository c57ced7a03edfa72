"""Errors of a callee, as they travel and as they are raised at the caller: with their type, place and traceback."""

from __future__ import annotations

import traceback
from typing import Any

from torsh_distributed import errors
from torsh_distributed.errors import RemoteError, TorshError, first_line

_MOST_CHARACTERS = 20_000
_CAUGHT_BY_TYPE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    FileExistsError,
    FileNotFoundError,
    IndexError,
    KeyError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    PermissionError,
    RecursionError,
    RuntimeError,
    TimeoutError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)
"""Types of Python that callers may catch as if the function had raised here."""


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error of a function as plain values."""
    text = "".join(traceback.format_exception(error))
    message = error.message if isinstance(error, TorshError) else str(error)
    return {
        "types": [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception)],
        "message": message[:_MOST_CHARACTERS],
        "hint": error.hint if isinstance(error, TorshError) else None,
        "traceback": text[-_MOST_CHARACTERS:],
    }


def remote_error(facts: Any, worker: str, function: str) -> RemoteError:
    """The error to raise here: a RemoteError that is also what the callee raised, where this process has that type."""
    facts = facts if isinstance(facts, dict) else {}
    types = [str(name) for name in facts.get("types") or ["Exception"]]
    kind = next((found for name in types if (found := _local_type(name)) is not None), None)
    message = f"{types[0]}: {first_line(Exception(str(facts.get('message', ''))))}"
    hint = facts.get("hint")
    error = _combined(kind or RemoteError)(
        message,
        hint=str(hint) if hint else None,
        worker=worker,
        function=function,
    )
    error.type_name = types[0]
    error.traceback = str(facts.get("traceback", ""))
    error.add_note(f"on {worker}:\n{error.traceback}")
    return error


def _local_type(name: str) -> type[Exception] | None:
    common = next((kind for kind in _CAUGHT_BY_TYPE if kind.__name__ == name), None)
    if common is not None:
        return common
    found = getattr(errors, name, None)
    is_ours = isinstance(found, type) and issubclass(found, TorshError) and found not in (TorshError, RemoteError)
    return found if is_ours else None


_combined_types: dict[type[Exception], type[RemoteError]] = {}


def _combined(kind: type[Exception]) -> type[RemoteError]:
    if issubclass(RemoteError, kind):
        return RemoteError
    if kind not in _combined_types:
        _combined_types[kind] = type("RemoteError", (RemoteError, kind), {"__module__": RemoteError.__module__})
    return _combined_types[kind]
