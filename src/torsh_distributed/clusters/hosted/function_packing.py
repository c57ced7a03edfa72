"""A function and its arguments as bytes for another process, by the engine's own pickler."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torsh_distributed.clusters.hosted.rank_host import FunctionWork
from torsh_distributed.errors import SerializationError


def pack_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, pickler: str
) -> FunctionWork:
    """Pickle the call, before any worker is asked for; raises SerializationError naming what does not pickle."""
    name = getattr(function, "__qualname__", repr(function))
    dumps = importlib.import_module(pickler).dumps
    try:
        packed: bytes = dumps((function, args, dict(kwargs)))
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise SerializationError(
            f"{name} cannot be sent to the workers: {_culprit(dumps, function, args, kwargs)} does not pickle",
            hint="open files, sockets, locks and process groups inside the function, on the worker",
            function=name,
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
        ) from error
    return FunctionWork(packed=packed, pickler=pickler, name=name)


def _culprit(
    dumps: Callable[[Any], bytes], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Which part of the call it is, as the user wrote it."""
    parts: dict[str, Any] = {f"argument {number}": value for number, value in enumerate(args)}
    parts.update({f"argument {key!r}": value for key, value in kwargs.items()})
    closure = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for free, cell in zip(names, closure, strict=False):
        parts[f"{free!r}, which it uses from around it,"] = cell.cell_contents
    for shown, value in parts.items():
        try:
            dumps(value)
        except Exception:  # it is the one
            return f"{shown} ({type(value).__name__})"
    return "the function itself or a global that it uses"
