"""A plan key by key: value, source, and whether it has an effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from typing_extensions import override


@dataclasses.dataclass(frozen=True)
class ExplainedKey:
    """One key of a plan."""

    key: str
    value: object
    source: str
    """argument, command line, environment VARIABLE, file PATH, or default."""
    status: str
    """honoured, not yet (this version would ignore it), or off by another key."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The rows of a plan; printed, a table of them."""

    rows: tuple[ExplainedKey, ...]

    def __iter__(self) -> Iterator[ExplainedKey]:
        return iter(self.rows)

    def __getitem__(self, key: str) -> ExplainedKey:
        return {row.key: row for row in self.rows}[key]

    @override
    def __str__(self) -> str:
        cells = [(row.key, show(row.value), row.source, row.status) for row in self.rows]
        widths = [max(len(cell[column]) for cell in cells) for column in range(4)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip() for cell in cells
        )


def show(value: object) -> str:
    """A value as a plan file would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
