"""A run's events as slices on tracks, on one clock, with collectives linked across ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.observe.trace.event_files import RankClocks, Record, RecordedRun

LAUNCHER = -1
TRACKS = ("steps", "phases", "collectives", "waits", "buckets", "checkpoints", "other")
_FACTS = ("time", "rank", "type", "start_s", "duration_s")
_OF_KIND = {
    "step": "steps",
    "phase": "phases",
    "collective": "collectives",
    "wait": "waits",
    "bucket": "buckets",
    "checkpoint": "checkpoints",
    "compile": "other",
    "rebalance": "other",
}
_MOMENTS = frozenset({"membership", "alert", "log", "decision", "pressure", "lending"})


@dataclass
class TraceSlice:
    """Something that took time on a rank, or a moment if `duration_s` is None."""

    rank: int
    track: str
    name: str
    start_s: float
    duration_s: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    link: tuple[str, int] | None = None
    """Group and number of a collective: the same on every rank that took part."""

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + (self.duration_s or 0.0)


def slices_of(run: RecordedRun, clocks: RankClocks) -> Iterator[TraceSlice]:
    """Everything that can be drawn, rank after rank."""
    for rank, records in sorted(run.ranks.items()):
        inside = _spans(records)
        for record in records:
            drawn = _slice(rank, record, clocks, inside)
            if drawn is not None:
                yield drawn
    for record in run.launchers:
        name = f"{record['type']}: {record.get('action') or record.get('name') or ''}".rstrip(": ")
        yield TraceSlice(LAUNCHER, "other", name, record["time"], None, _facts(record))


def links(slices: list[TraceSlice]) -> Iterator[list[TraceSlice]]:
    """The slices of one collective on all its ranks, in the order in which the ranks came to it; at least two."""
    found: defaultdict[tuple[str, int], list[TraceSlice]] = defaultdict(list)
    for one in slices:
        if one.link is not None:
            found[one.link].append(one)
    for together in found.values():
        if len({one.rank for one in together}) > 1:
            yield sorted(together, key=lambda one: one.start_s)


def _slice(rank: int, record: Record, clocks: RankClocks, inside: list[tuple[float, float]]) -> TraceSlice | None:
    kind = record["type"]
    if kind in _MOMENTS:
        name = f"{kind}: {record.get('action') or record.get('name') or record.get('subject') or ''}".rstrip(": ")
        return TraceSlice(rank, "other", name, clocks.from_wall(rank, record["time"]), None, _facts(record))
    track, duration_s = _OF_KIND.get(kind), record.get("duration_s")
    if track is None or duration_s is None:
        return None
    if record.get("start_s") is not None:
        start_s = clocks.from_monotonic(rank, record["start_s"])
    else:
        start_s = clocks.from_wall(rank, record["time"]) - duration_s
    link = None
    if kind == "collective" and record.get("peer") is None:
        link = (record["group"], record["sequence"])
    elif kind == "wait" and record.get("sequence") is not None and not _is_inside(record, inside):
        link = (f"{record['group']} (by torch)", record["sequence"])
    return TraceSlice(rank, track, _name(record), start_s, duration_s, _facts(record), link)


def _name(record: Record) -> str:
    match record["type"]:
        case "step":
            return f"step {record['step']}"
        case "phase":
            return str(record["phase"])
        case "bucket":
            return f"bucket {record['index']}"
        case "checkpoint":
            return f"checkpoint {record['action']}"
        case "compile":
            return f"compile {record['function']}"
        case "collective" | "wait":
            return str(record["op"])
    return str(record["type"])


def _facts(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _FACTS and value is not None}


def _spans(records: list[Record]) -> list[tuple[float, float]]:
    """When this rank was inside an operation of this library, whose own messages are not operations by themselves."""
    return [
        (record["start_s"], record["start_s"] + record["duration_s"])
        for record in records
        if record["type"] == "collective"
    ]


def _is_inside(record: Record, spans: list[tuple[float, float]]) -> bool:
    import bisect

    at = bisect.bisect_right(spans, (record["start_s"], float("inf"))) - 1
    return at >= 0 and record["start_s"] + record["duration_s"] <= spans[at][1] + 1e-6
