"""A group of commands that imports a command's module when the command is invoked.

Why: `torsh --help` and a typo must not wait for torch. Each command's line of help is written beside its
module's name; a test keeps it equal to the command's own.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override


def lazy_group(commands: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=…)`: name to (module that has the command as a Typer named `app`, line of help)."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
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
            self._loaded[name] = typer.main.get_command(app)
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
