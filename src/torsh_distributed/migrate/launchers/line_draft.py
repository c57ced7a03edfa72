"""A command line of another launcher as far as it has been read, and readers of single options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.report import KeyVerdict, Verdict
from torsh_distributed.plan.problems import did_you_mean


@dataclass
class LineDraft:
    """Options of `torsh run`, variables of its workers, and the verdict on each option that was read."""

    launcher: str
    options: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    entries: list[KeyVerdict] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    """Values that several options make one thing of."""

    def note(self, option: str, values: Sequence[str], verdict: Verdict, means: str, reason: str = "") -> None:
        """The verdict on an option."""
        self.entries.append(KeyVerdict(option, " ".join(values), verdict, means, reason))


@dataclass(frozen=True, slots=True)
class LineOption:
    """How many values an option takes, and what becomes of it."""

    num_values: int
    read: Callable[[LineDraft, str, list[str]], None]


def as_option(name: str, num_values: int = 1) -> LineOption:
    """An option of `torsh run` with the same value."""

    def read(draft: LineDraft, option: str, values: list[str]) -> None:
        draft.options += [name, *values]
        draft.note(option, values, Verdict.HONOURED, " ".join([name, *values]))

    return LineOption(num_values, read)


def as_variable(name: str, value: str | None = None) -> LineOption:
    """A variable of the workers; `value` is that of a switch."""

    def read(draft: LineDraft, option: str, values: list[str]) -> None:
        draft.env[name] = values[0] if value is None else value
        draft.note(option, values, Verdict.HONOURED, f"{name}={draft.env[name]}")

    return LineOption(1 if value is None else 0, read)


def keep(name: str, num_values: int = 1) -> LineOption:
    """Remember the value; what it becomes depends on others."""

    def read(draft: LineDraft, option: str, values: list[str]) -> None:
        draft.taken[name] = values[0] if values else "true"

    return LineOption(num_values, read)


def same_anyway(reason: str, num_values: int = 1, means: str = "") -> LineOption:
    """What it asks for happens by other means."""

    def read(draft: LineDraft, option: str, values: list[str]) -> None:
        draft.note(option, values, Verdict.EQUIVALENT, means, reason)

    return LineOption(num_values, read)


def without_effect(reason: str, num_values: int = 1) -> LineOption:
    """It changes no result."""

    def read(draft: LineDraft, option: str, values: list[str]) -> None:
        draft.note(option, values, Verdict.HINT, "", reason)

    return LineOption(num_values, read)


def not_here(reason: str, num_values: int = 1) -> LineOption:
    """Not done here; `reason` says what to do."""

    def read(draft: LineDraft, option: str, values: list[str]) -> None:
        draft.note(option, values, Verdict.REFUSED, "", reason)

    return LineOption(num_values, read)


def read_options(draft: LineDraft, words: Sequence[str], table: Mapping[str, LineOption]) -> list[str]:
    """Read the options at the beginning of `words`; returns the program and its arguments.

    Long names may have dashes or underscores. Raises InvalidArgument for one that the launcher does not have.
    """
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        known = name if name in table else name.replace("_", "-")
        if known not in table:
            near = did_you_mean(known, table)
            raise InvalidArgument(f"{draft.launcher} has no option {name}", hint=near or "look at its --help")
        option = table[known]
        values = [value] if has_value else rest[: option.num_values]
        if not has_value:
            del rest[: option.num_values]
        if option.num_values and len(values) < (1 if has_value else option.num_values):
            raise InvalidArgument(f"{name} takes {option.num_values} value(s)", option=name)
        option.read(draft, name, values)
    return rest[1:] if rest[:1] == ["--"] else rest
