"""A plan file that cannot be parsed, and where: what the parsers of all formats raise."""

from __future__ import annotations


class MalformedError(Exception):
    """What the parser found, and where (line and column from 1) if it knows."""

    def __init__(self, reason: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = f", line {place[0]}, column {place[1]}" if place else ""


def position(text_before: str) -> tuple[int, int]:
    """Line and column, from 1, of what follows this text."""
    return text_before.count("\n") + 1, len(text_before) - (text_before.rfind("\n") + 1) + 1
