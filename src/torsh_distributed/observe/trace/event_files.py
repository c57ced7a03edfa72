"""Reads the event files of a run (`rank-0.jsonl`, `launcher-4711.jsonl`), whole or cut off by a crash.

One clock for all ranks: each rank's monotonic clock as wall-clock time, corrected between machines.
On one machine all processes have the same clocks. Between machines the wall clocks differ, and collectives tell by how
much: none ends on a rank before it has begun on every other. Each bounds the difference from both sides, and many of
them leave a narrow interval, whose middle is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
from collections import defaultdict
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
    """Lines that are not events."""

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


# Operations that no rank leaves before all have come.
_MEETINGS = frozenset(
    {"all_reduce", "all_gather", "all_gather_single", "reduce_scatter_single", "barrier", "all_to_all_single"}
)
_SAME_MACHINE_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class RankClocks:
    """How to turn a rank's times into the common ones."""

    offsets_s: dict[int, float]
    """Wall clock minus monotonic clock, by rank."""
    skews_s: dict[int, float]
    """What is taken off a rank's wall clock, by rank; 0 on rank 0's machine."""
    error_s: float
    """The largest uncertainty of a correction; 0 if none was needed."""

    def from_monotonic(self, rank: int, seconds: float) -> float:
        """The common time of a moment on a rank's monotonic clock."""
        return seconds + self.offsets_s[rank] - self.skews_s[rank]

    def from_wall(self, rank: int, seconds: float) -> float:
        """The common time of a moment on a rank's wall clock."""
        return seconds - self.skews_s[rank]


def align_clocks(run: RecordedRun) -> RankClocks:
    """The clocks of a run. A rank without timed events keeps its own wall clock."""
    offsets = {rank: _offset_s(records) for rank, records in run.ranks.items()}
    first = min(run.ranks)
    meetings = _meetings(run, offsets)
    skews, error_s = {first: 0.0}, 0.0
    for rank in run.ranks:
        if rank == first:
            continue
        low, high = _bounds(meetings, first, rank)
        if low <= 0.0 <= high or abs(offsets[rank] - offsets[first]) < _SAME_MACHINE_S:
            skews[rank] = 0.0  # nothing contradicts the wall clocks
        elif low <= high:
            skews[rank] = (low + high) / 2
            error_s = max(error_s, (high - low) / 2)
        else:
            skews[rank] = statistics.median((low, high))  # clocks that drifted: no single difference fits
            error_s = max(error_s, (low - high) / 2)
    return RankClocks(offsets_s=offsets, skews_s=skews, error_s=error_s)


def _offset_s(records: list[Record]) -> float:
    """Events are made when what they tell of has ended, so both clocks are known then."""
    found = [
        record["time"] - (record["start_s"] + record["duration_s"])
        for record in records
        if record.get("start_s") is not None and record.get("duration_s") is not None
    ]
    # The least delay between the end and the event: later ones were held up.
    return min(found, default=0.0)


def _meetings(run: RecordedRun, offsets: dict[int, float]) -> dict[tuple[str, int], dict[int, tuple[float, float]]]:
    """(start, end) by rank of every collective, by group and number, in wall-clock times."""
    found: defaultdict[tuple[str, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank, record in run.of("collective"):
        if record["op"].partition(":")[0] in _MEETINGS and record.get("error") is None:
            start = record["start_s"] + offsets[rank]
            found[record["group"], record["sequence"]][rank] = start, start + record["duration_s"]
    return found


def _bounds(
    meetings: dict[tuple[str, int], dict[int, tuple[float, float]]], first: int, rank: int
) -> tuple[float, float]:
    """By how much the rank's clock may be ahead of the first's."""
    low, high = float("-inf"), float("inf")
    for times in meetings.values():
        if first in times and rank in times:
            (here_start, here_end), (there_start, there_end) = times[first], times[rank]
            high = min(high, there_end - here_start)
            low = max(low, there_start - here_end)
    return low, high
