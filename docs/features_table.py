"""The page `reference/features.md`, made from `features.toml`: what is there, by what name, and what is not.

`python docs/features_table.py` writes it; a test holds every name against the code and the page against the file.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "reference" / "features.md"
VERDICTS = ("there", "partly", "not there", "refused")
_HEAD = """# Features

What a framework for distributed training is asked for, and where it is here. Names are of the code (`td` is
`torsh_distributed`), of the command line, or keys of a plan; a test sees to it that they exist.

"""


@dataclass(frozen=True)
class Feature:
    """A row: what is asked for, whether it is there, by which names, and what else there is to say."""

    what: str
    verdict: str
    names: tuple[str, ...]
    note: str


def chapters() -> dict[str, list[Feature]]:
    """The rows by title of their chapter."""
    found = tomllib.loads((HERE / "features.toml").read_text())
    return {
        one["title"]: [Feature(what, verdict, tuple(names), note) for what, verdict, names, note in one["rows"]]
        for one in found.values()
    }


def render() -> str:
    """The page."""
    features = chapters()
    counts = Counter(one.verdict for rows in features.values() for one in rows)
    lines = [_HEAD + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS) + "."]
    for title, rows in features.items():
        lines += ["", f"## {title}", "", "| Feature | | Where | |", "|---|---|---|---|"]
        for one in rows:
            where = ", ".join(f"`{name}`" for name in one.names)
            lines.append(f"| {one.what} | {one.verdict} | {where} | {one.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
