"""Command lines of other launchers, as `torsh run` takes them: `torsh run --as LIBRARY`, then that launcher's options.

Each library has a module with `translate(args, ours)`. Every option of theirs is honoured, or has no effect and says
why, or is refused by name. Imports no torch: the launcher reads command lines.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torsh_distributed.errors import InvalidArgument

RUN_AS_VARIABLE = "TORSH_RUN_AS"
"""Tells Python processes of a worker which library to stand in for."""

TRANSLATORS: dict[str, str | None] = {
    "deepspeed": "torsh_distributed.migrate.deepspeed.deepspeed_line",
    "fairscale": None,
    "horovod": "torsh_distributed.migrate.horovod.launching.horovodrun_line",
}
"""The libraries that `--as` knows, with what reads their options; FairScale has no launcher: lines are ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslatedLine:
    """A command line of another launcher, as ours."""

    args: list[str]
    """Arguments of `torsh run`."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the workers."""
    notes: list[str] = field(default_factory=list)
    """What has no effect here, and why."""


def translate_line(package: str, args: Sequence[str], ours: Mapping[str, bool]) -> TranslatedLine:
    """`args` of `torsh run --as PACKAGE`, without those two, as arguments of `torsh run`.

    `ours`: the options of `torsh run`, and whether each takes a value; they may be mixed with the other launcher's.
    """
    if package not in TRANSLATORS:
        near = difflib.get_close_matches(package, TRANSLATORS, n=1)
        raise InvalidArgument(
            f"--as does not know {package!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(TRANSLATORS)}",
            package=package,
        )
    reader = TRANSLATORS[package]
    line = TranslatedLine(args=list(args))
    if reader is not None:
        line = importlib.import_module(reader).translate(args, ours)
    return TranslatedLine(args=line.args, env={RUN_AS_VARIABLE: package, **line.env}, notes=line.notes)


def find_run_as(args: Sequence[str], ours: Mapping[str, bool]) -> tuple[str, list[str]] | None:
    """The library of `--as` among the options of `torsh run`, and the other arguments; None without `--as`.

    It comes before options of the other launcher: what they take is not known yet.
    """
    index = 0
    while index < len(args):
        word = args[index]
        name, has_value, value = word.partition("=")
        if name == "--as":
            if not has_value and index + 1 == len(args):
                raise InvalidArgument("--as needs the name of a library", hint=f"known: {', '.join(TRANSLATORS)}")
            rest = [*args[:index], *args[index + (1 if has_value else 2) :]]
            return (value if has_value else args[index + 1]), rest
        spelled = name.replace("_", "-")
        if spelled not in ours:
            return None
        index += 2 if ours[spelled] and not has_value else 1
    return None
