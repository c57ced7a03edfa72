"""Reads the event files of a run (`rank-0.jsonl`, `launcher-4711.jsonl`), whole or cut off by a crash."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torsh_distributed.errors import IoError
from torsh_distributed.events import event_types
from torsh_distributed.events.recorded import event_of, is_time, record_in

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
        if match is None or not path.is_file():
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
    with path.open("rb") as file:
        for line in file:
            record = _sound(record_in(line))
            if record is not None:
                records.append(record)
            else:
                num_damaged += 1
    return num_damaged


def _sound(record: Any) -> Record | None:
    """A record whose values fit its kind, with the fields that it leaves out; of a newer version's kind, as it is."""
    event = event_of(record)
    if event is not None:
        return {**_defaults(event.kind), **record}
    is_newer = (
        isinstance(record, dict)
        and isinstance(record.get("type"), str)
        and record["type"] not in event_types()
        and is_time(record.get("time"))
    )
    return record if is_newer else None


@functools.cache
def _defaults(kind: str) -> Record:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(event_types()[kind])
    return {field.name: field.default for field in fields if field.default is not missing}
