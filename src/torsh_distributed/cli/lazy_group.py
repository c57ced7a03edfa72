"""A group of commands that imports a command's module when the command is invoked.

Why: `torsh --help` and a typo must not wait for torch. Each command's line of help is written beside its
module's name; a test keeps it equal to the command's own. Nor must they wait for pydantic: from 0.29 on typer
checks every option with it, also those that are not given.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override


def lazy_group(commands: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=…)`: name to (module that has the command as a Typer named `app`, line of help)."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            take_plain_values(self)
            self.commands = _LoadedOnAccess({name: module for name, (module, _) in commands.items()})

        @override
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        @override
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """What help and completion show of a command, without importing it. Any: typer has its own click."""
            return TyperCommand(cmd_name, help=commands[cmd_name][1]) if cmd_name in commands else None

        @override
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, command if command is None else self.commands[args[0]], rest

    return LazyGroup


class _LoadedOnAccess(MutableMapping[str, Any]):
    """Commands by name, each imported when it is looked up."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules
        self._loaded: dict[str, Any] = {}

    @override
    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            app = importlib.import_module(self._modules[name]).app
            self._loaded[name] = command = typer.main.get_command(app)
            take_plain_values(command)
            if not gc.isenabled():  # turned off by `entry_point` for the imports, whose objects all stay
                gc.freeze()
                gc.enable()
        return self._loaded[name]

    @override
    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command
        self._modules.setdefault(name, "")

    @override
    def __delitem__(self, name: str) -> None:
        del self._modules[name]
        self._loaded.pop(name, None)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    @override
    def __len__(self) -> int:
        return len(self._modules)


def take_plain_values(command: Any) -> None:
    """Let options and arguments that are not given, or given as what they are declared to be, pass unchecked.

    The command's children too. Any: typer has its own click, which changes places between versions.
    """
    command.get_params = partial(_unchecked_if_plain, command.get_params)
    children = getattr(command, "commands", {})
    if not isinstance(children, _LoadedOnAccess):  # which does this for each that it loads
        for child in children.values():
            take_plain_values(child)


def _unchecked_if_plain(get_params: Callable[[Any], list[Any]], ctx: Any) -> list[Any]:
    """The parameters of a command, with `--help`, which typer makes late."""
    params = get_params(ctx)
    for param in params:
        has_checks_by_pydantic = hasattr(param, "type_descriptor")  # since typer 0.29
        if has_checks_by_pydantic and not isinstance(param.process_value, partial):
            param.process_value = partial(_value_of, param, param.process_value)
    return params


def _value_of(param: Any, check: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    declared = param.type_descriptor.annotation
    if param.multiple or param.nargs != 1:
        is_plain = not value or (declared == list[str] and all(isinstance(each, str) for each in value))
        plain: Any = list(value or ())
    else:
        is_plain = value is None or (declared in (bool, str, int, float) and type(value) is declared)
        plain = value
    is_missing = param.required and plain in (None, [])
    if not is_plain or is_missing:
        return check(ctx, value)
    return plain if param.callback is None else param.callback(ctx, param, plain)
