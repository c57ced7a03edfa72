"""What a renderer makes: named texts, some of them to be run; and how they are written down."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.errors import InvalidArgument, IoError

_PLAIN_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """One file."""

    name: str
    text: str
    is_program: bool = False


def write_files(files: Iterable[RenderedFile], folder: Path, *, replaces: bool) -> list[Path]:
    """Write the files; one that is there already is an error before anything is written, unless it `replaces`."""
    files = list(files)
    there = [str(folder / one.name) for one in files if (folder / one.name).exists()]
    if there and not replaces:
        raise InvalidArgument(f"{', '.join(there)} exists already", hint="--force replaces it", path=there[0])
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in files:
            path = folder / one.name
            draft = path.with_name(f".{one.name}.{os.getpid()}")
            draft.write_text(one.text)
            draft.chmod(0o755 if one.is_program else 0o644)
            draft.replace(path)
            written.append(path)
    except OSError as error:
        raise IoError(f"{folder} cannot be written: {error.strerror or error}", path=str(folder)) from error
    return written


def exported(variables: dict[str, str]) -> list[str]:
    """Lines of shell that set variables."""
    for name in variables:
        if not _PLAIN_VARIABLE.fullmatch(name):
            raise InvalidArgument("a variable's name has letters, digits and '_'", variable=name)
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]


def folded(words: Sequence[str], *, indent: str = "  ") -> str:
    """A command over several lines, each begun by an option; words are taken as they are, so quote them before."""
    lines: list[str] = []
    for word in words:
        if not lines:
            lines.append(word)
        elif word.startswith("-"):
            lines.append(f"{indent}{word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)
