"""One clock for all ranks: each rank's monotonic clock as wall-clock time, corrected between machines.

On one machine all processes have the same clocks. Between machines the wall clocks differ, and collectives tell by how
much: none ends on a rank before it has begun on every other. Each bounds the difference from both sides, and many of
them leave a narrow interval, whose middle is taken.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from torsh_distributed.observe.trace.event_files import Record, RecordedRun

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
