"""The public surface is a file: names and commands change only together with it.

Renew it with `python -m tests.test_public_api > tests/api.txt` and say why in the commit.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import typer.main

import torsh_distributed

FROZEN = Path(__file__).parent / "api.txt"


def public_names() -> Iterator[str]:
    """Every name that a package lists in __all__."""
    packages = [torsh_distributed.__name__] + [
        info.name
        for info in pkgutil.walk_packages(torsh_distributed.__path__, f"{torsh_distributed.__name__}.")
        if info.ispkg
    ]
    for package in sorted(packages):
        module = importlib.import_module(package)
        for name in sorted(getattr(module, "__all__", [])):
            assert hasattr(module, name), f"{package}.__all__ names {name}, which is not there"
            yield f"{package}.{name}"


def commands() -> Iterator[str]:
    """Every command with its options."""
    from torsh_distributed.cli.app import app

    def walk(command: object, path: str) -> Iterator[str]:
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            yield from walk(inner, f"{path} {name}")
        options = sorted(option for param in command.params for option in (*param.opts, *param.secondary_opts))  # type: ignore[attr-defined]
        yield f"{path}: {' '.join(options)}".rstrip(": ")

    yield from walk(typer.main.get_command(app), "torsh")


def surface() -> list[str]:
    return [*public_names(), *commands()]


def test_the_public_surface_is_the_frozen_one() -> None:
    assert surface() == FROZEN.read_text().splitlines(), f"see {__file__} for how to change it"


def test_no_public_name_means_two_things() -> None:
    """One type per concept: the same name in two packages must be the same object.

    `migrate` is apart: its names are those of the libraries it stands in for. So is a verb that engines share.
    """
    seen: dict[str, tuple[str, object]] = {}
    for path in (path for path in public_names() if not path.startswith("torsh_distributed.migrate.")):
        package, _, name = path.rpartition(".")
        if package.startswith("torsh_distributed.clusters.") and name == "run_training":
            continue
        value = getattr(importlib.import_module(package), name)
        if name in seen:
            assert seen[name][1] is value, f"{path} is not {seen[name][0]}"
        seen[name] = (path, value)


if __name__ == "__main__":
    print("\n".join(surface()))
