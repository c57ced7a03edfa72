"""One verdict on every key of another library's config, with the reason. Nothing is dropped silently.

Every translator returns a plan beside a `MigrationReport`. A key that the other library does not know gets no verdict:
it is an error with the nearest name, because it was a mistake before it came here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.problems import Problem, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table


class Verdict(StrEnum):
    """What becomes of a key."""

    HONOURED = "honoured"
    """It has the same meaning here."""
    EQUIVALENT = "equivalent"
    """The result is the same, by other means."""
    HINT = "hint"
    """It changes no result: it tunes a mechanism that works in another way here."""
    REFUSED = "refused"
    """What it asks for is not done here."""


@dataclass(frozen=True, slots=True)
class KeyVerdict:
    """What becomes of one key."""

    key: str
    """The key in full, in the other library's spelling: `zero_optimization.stage`."""
    value: Any
    """As it was given."""
    verdict: Verdict
    means: str
    """What it is here: a key of a plan with its value, or a call; empty if nothing stands for it."""
    reason: str = ""
    """Why, and for a refused key what to write instead."""


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The verdicts on one config, in the order of its keys."""

    kind: str
    """Whose config it is: `deepspeed`, `fairscale`, `accelerate`, …"""
    entries: tuple[KeyVerdict, ...]

    def __iter__(self) -> Iterator[KeyVerdict]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, key: str) -> KeyVerdict:
        """The verdict on `key`. Raises KeyError if the config does not have it."""
        for entry in self.entries:
            if entry.key == key:
                return entry
        raise KeyError(key)

    def having(self, verdict: Verdict) -> tuple[KeyVerdict, ...]:
        """The entries with this verdict."""
        return tuple(entry for entry in self.entries if entry.verdict is verdict)

    @property
    def refused(self) -> tuple[KeyVerdict, ...]:
        """The keys that ask for what is not done here; the plan does without them."""
        return self.having(Verdict.REFUSED)

    @property
    def summary(self) -> str:
        """How many keys have each verdict."""
        counts = ((len(self.having(verdict)), verdict) for verdict in Verdict)
        return f"{self.kind}: " + (", ".join(f"{count} {verdict}" for count, verdict in counts if count) or "no keys")

    def require_accepted(self) -> None:
        """Raise ConfigurationError with every refused key, its reason and what to write instead."""
        if not self.refused:
            return
        lines = [f"  {entry.key} = {shown(entry.value)}: {entry.reason}" for entry in self.refused]
        raise ConfigurationError(
            "\n".join([f"the {self.kind} config asks for what is not done here:", *lines]),
            hint="take these keys out, or write what their lines say",
        )

    def table(self) -> Table:
        """All verdicts as a rich table."""
        from rich.table import Table  # here: a script that reads a config prints none
        from rich.text import Text

        colours = {
            Verdict.HONOURED: "green",
            Verdict.EQUIVALENT: "green",
            Verdict.HINT: "yellow",
            Verdict.REFUSED: "red",
        }
        table = Table("key", "value", "verdict", "here", "why", title=self.summary, title_justify="left")
        for entry in self.entries:
            table.add_row(
                Text(entry.key),
                Text(shown(entry.value)),
                Text(entry.verdict, style=colours[entry.verdict]),
                Text(entry.means),
                Text(entry.reason),
            )
        return table

    @override
    def __str__(self) -> str:
        lines = [self.summary]
        for entry in self.entries:
            means = f" → {entry.means}" if entry.means else ""
            reason = f": {entry.reason}" if entry.reason else ""
            lines.append(f"  {entry.verdict:<10} {entry.key} = {shown(entry.value)}{means}{reason}")
        return "\n".join(lines)


def unknown_key(key: str, known: Iterable[str], *, kind: str) -> Problem:
    """The problem of a key that the other library does not have either; `known` are the names beside it."""
    names = sorted(known)
    section, _, name = key.rpartition(".")
    place = f"{kind}'s {section}" if section else f"a {kind} config"
    nearest = did_you_mean(name, names)
    return Problem(key, f"{key} is not a key of {place}", nearest or f"it has: {', '.join(names)}")


def shown(value: Any) -> str:
    """A foreign value on one line."""
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
