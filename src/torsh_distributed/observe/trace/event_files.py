"""Reads the event files of a run (`rank-0.jsonl`, `launcher-4711.jsonl`), whole or cut off by a crash."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torsh_distributed.errors import IoError

Record = dict[str, Any]
"""An event as it is in the file: `time`, `rank`, `type`, then its own fields."""

_NAME = re.compile(r"(rank|launcher)-(\d+)(\.older)?\.jsonl$")


@dataclass
class RecordedRun:
    """The events of a run, by rank, each in order of time."""

    folder: Path
    ranks: dict[int, list[Record]] = field(default_factory=dict)
    launchers: list[Record] = field(default_factory=list)
    num_damaged: int = 0
    """Lines that are no events."""

    def of(self, *kinds: str) -> Iterator[tuple[int, Record]]:
        """Rank and event, for all events of these kinds."""
        for rank, records in sorted(self.ranks.items()):
            for record in records:
                if record["type"] in kinds:
                    yield rank, record


def read_run(folder: Path) -> RecordedRun:
    """All events under a run's directory, or under its `events`. Raises IoError if there are none."""
    run = RecordedRun(folder)
    where = folder / "events" if (folder / "events").is_dir() else folder
    # What was written first is in the file that was set aside.
    found = sorted(where.glob("*.jsonl"), key=lambda path: (".older" not in path.name, path.name))
    for path in found:
        match = _NAME.search(path.name)
        if match is None:
            continue
        records = run.ranks.setdefault(int(match[2]), []) if match[1] == "rank" else run.launchers
        run.num_damaged += _read(path, records)
    if not run.ranks:
        raise IoError(
            "there are no events of a run",
            hint="record a run with `torsh run --trace DIR` or TORSH_EVENTS_DIR=DIR",
            path=str(folder),
        )
    for records in (*run.ranks.values(), run.launchers):
        records.sort(key=lambda record: record["time"])
    return run


def _read(path: Path, records: list[Record]) -> int:
    num_damaged = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                num_damaged += 1
                continue
            is_sound = (
                isinstance(record, dict)
                and isinstance(record.get("type"), str)
                and isinstance(record.get("time"), int | float)
            )
            if is_sound:
                records.append(record)
            else:
                num_damaged += 1
    return num_damaged
