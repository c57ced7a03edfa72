"""What goes under an old name, and the version that no longer knows it.

One table, so that a release shows at once what has to go: a test fails when a version is reached that is written here.
"""

from __future__ import annotations

from collections.abc import Mapping

ENDS: Mapping[str, str] = {"plan keys": "0.3", "arguments": "0.3"}
"""Kind of name to the first version without it: at least two minor versions after the notice appeared."""


def notice(kind: str, old: str, new: str) -> str:
    """What a user of an old name is told."""
    return f"{old} is an old name of {new}, known until version {ENDS[kind]}; please use the new one"
