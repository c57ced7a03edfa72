"""From the target of a job to a command line; what cannot start is refused at once."""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from torsh_distributed.errors import InvalidArgument, IoError
from torsh_distributed.launch.spec import Entry, EntryKind

_START = str(Path(__file__).parent / "worker" / "worker_start.py")


def command_line(entry: Entry) -> list[str]:
    """The argument vector of a worker. Python runs with `-u` so no line is lost in a buffer at a crash.

    A script or module runs under `worker_start`, which tells the launcher how it ends.
    """
    match entry.kind:
        case EntryKind.SCRIPT:
            return [sys.executable, "-u", _START, entry.target, *entry.args]
        case EntryKind.MODULE:
            return [sys.executable, "-u", _START, "-m", entry.target, *entry.args]
        case EntryKind.COMMAND:
            return [entry.target, *entry.args]


def check_entry(entry: Entry) -> None:
    """Raise if no worker could start: missing or unreadable script, unknown module or command.

    Why first: otherwise every rank fails with its own traceback, once per restart.
    """
    match entry.kind:
        case EntryKind.SCRIPT:
            _check_script(Path(entry.target))
        case EntryKind.MODULE:
            _check_module(entry.target)
        case EntryKind.COMMAND:
            if shutil.which(entry.target) is None:
                raise InvalidArgument(
                    f"the command {entry.target!r} is not found or not executable",
                    hint="--no-python runs the target as it is: give a program on PATH or a path to one",
                    command=entry.target,
                )


def _check_script(script: Path) -> None:
    if not script.exists():
        near = _similar_files(script)
        raise InvalidArgument(
            f"the script {str(script)!r} does not exist",
            hint=f"did you mean {near[0]!r}?"
            if near
            else "check the path; options of torsh run come before the script",
            script=str(script),
            directory=str(Path.cwd()),
        )
    if script.is_dir():
        if not (script / "__main__.py").is_file():
            raise InvalidArgument(
                f"{str(script)!r} is a directory without __main__.py",
                hint="name a script, or a module with -m",
                script=str(script),
            )
        return
    try:
        with script.open("rb"):
            pass
    except OSError as error:
        raise IoError(
            f"the script {str(script)!r} cannot be read",
            hint="check its permissions for this user",
            script=str(script),
            reason=error.strerror or str(error),
        ) from error


def _similar_files(script: Path) -> list[str]:
    folder = script.parent
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.suffix == ".py"]
    return [str(folder / name) for name in difflib.get_close_matches(script.name, names, n=1)]


def _check_module(name: str) -> None:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise InvalidArgument(
            f"{name!r} is not the name of a module",
            hint="with -m give a dotted name such as package.train; without -m give a path",
            module=name,
        )
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    for end in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:end]), path)
        if spec is None:
            raise InvalidArgument(
                f"no module named {'.'.join(parts[:end])!r} is found",
                hint="check the name, the current directory and PYTHONPATH; install the package in this environment",
                module=name,
                interpreter=sys.executable,
            )
        path = spec.submodule_search_locations
    if path is not None and _find_spec(f"{name}.__main__", path) is None:
        raise InvalidArgument(
            f"{name!r} is a package without __main__, which -m would run",
            hint=f"name one of its modules, such as {name}.train",
            module=name,
        )


def _find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The module's spec, asked of the import system without importing its parents.

    Why: importing would run the user's package in the launcher. A plain `python -m` looks in the current
    directory first, which the launcher's own path does not hold.
    """
    if path is None and not os.environ.get("PYTHONSAFEPATH"):
        here = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
        if here is not None:
            return here
    for finder in sys.meta_path:
        found = finder.find_spec(name, path)
        if found is not None:
            return found
    return None
