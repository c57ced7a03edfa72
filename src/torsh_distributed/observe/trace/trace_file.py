"""Writes a timeline in the trace event format, for https://ui.perfetto.dev and chrome://tracing, bounded in size.

A process of the trace is a rank, its threads are the tracks. Collectives are linked by flow arrows, from the first rank
that came to the last. Traces of torch.profiler in the same directory are joined: Kineto writes rank and base time.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.errors import IoError
from torsh_distributed.observe.trace.event_files import RankClocks, RecordedRun, align_clocks, read_run
from torsh_distributed.observe.trace.timeline import LAUNCHER, TRACKS, TraceSlice, links, slices_of

DEFAULT_LIMIT_MB = 200.0
_SLICE_BYTES = 260
"""About what a slice with its facts takes in the file."""
_PROFILER_TRACK = 1000
_KEPT = frozenset({"steps", "checkpoints", "other"})
_LAUNCHER_PID = 1_000_000

TraceEvent = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WrittenTrace:
    """What is in a trace file."""

    path: Path
    num_ranks: int
    num_slices: int
    num_links: int
    num_dropped: int
    """Slices left out because of the limit: the shortest ones."""
    num_profiles: int
    clock_error_s: float


def write_trace(folder: Path, target: Path, *, limit_mb: float = DEFAULT_LIMIT_MB) -> WrittenTrace:
    """Merge the events of a run, and the profiles beside them, into one file; `.gz` is compressed."""
    run = read_run(folder)
    clocks = align_clocks(run)
    slices, num_dropped = _within(list(slices_of(run, clocks)), limit_mb)
    linked = list(links(slices))
    zero_s = min(one.start_s for one in slices) if slices else 0.0
    profiles = list(_profiles(folder))
    facts = {
        "ranks": sorted(run.ranks),
        "dropped_slices": num_dropped,
        "clock_error_s": clocks.error_s,
        "start": zero_s,
        "damaged_lines": run.num_damaged,
    }
    opener = gzip.open if target.suffix == ".gz" else open
    unfinished = target.with_name(f".{target.name}.part")
    try:
        with opener(unfinished, "wt", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(facts) + ', "traceEvents": [\n')
            is_first = True
            for event in _events(run, slices, linked, profiles, clocks, zero_s):
                file.write(("" if is_first else ",\n") + json.dumps(event, default=str))
                is_first = False
            file.write("\n]}\n")
        os.replace(unfinished, target)  # noqa: PTH105 - atomic
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise IoError("the trace cannot be written", path=str(target), reason=str(error)) from error
    return WrittenTrace(
        path=target,
        num_ranks=len(run.ranks),
        num_slices=len(slices),
        num_links=len(linked),
        num_dropped=num_dropped,
        num_profiles=len(profiles),
        clock_error_s=clocks.error_s,
    )


def _within(slices: list[TraceSlice], limit_mb: float) -> tuple[list[TraceSlice], int]:
    """The slices that fit; steps, checkpoints and faults always stay, of the others the longest."""
    most = max(1, int(limit_mb * 2**20 / _SLICE_BYTES))
    if len(slices) <= most:
        return slices, 0
    fixed = [one for one in slices if one.track in _KEPT]
    rest = sorted((one for one in slices if one.track not in _KEPT), key=lambda one: -(one.duration_s or 0.0))
    kept = rest[: max(0, most - len(fixed))]
    return [*fixed, *kept], len(rest) - len(kept)


def _events(
    run: RecordedRun,
    slices: list[TraceSlice],
    linked: list[list[TraceSlice]],
    profiles: list[tuple[int, dict[str, Any]]],
    clocks: RankClocks,
    zero_s: float,
) -> Iterator[TraceEvent]:
    pids = [*sorted(run.ranks), *([LAUNCHER] if run.launchers else [])]
    for rank in pids:
        name = "launcher" if rank == LAUNCHER else f"rank {rank}"
        yield {"ph": "M", "pid": _pid(rank), "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": _pid(rank), "name": "process_sort_index", "args": {"sort_index": rank}}
        for number, track in enumerate(TRACKS):
            yield {"ph": "M", "pid": _pid(rank), "tid": number, "name": "thread_name", "args": {"name": track}}
    for one in slices:
        place = {"pid": _pid(one.rank), "tid": TRACKS.index(one.track), "ts": _us(one.start_s - zero_s)}
        if one.duration_s is None:
            yield {"ph": "i", "s": "g" if one.rank == LAUNCHER else "p", "name": one.name, **place, "args": one.facts}
        else:
            yield {"ph": "X", "dur": _us(one.duration_s), "name": one.name, **place, "args": one.facts}
    for number, together in enumerate(linked):
        for position, one in enumerate(together):
            phase = "s" if position == 0 else "f" if position == len(together) - 1 else "t"
            # Inside the slice: an arrow binds to what encloses it.
            inside_s = one.start_s - zero_s + (one.duration_s or 0.0) / 2
            event = {
                "ph": phase,
                "id": number,
                "cat": "collective",
                "name": one.name,
                "pid": _pid(one.rank),
                "tid": TRACKS.index(one.track),
                "ts": _us(inside_s),
            }
            yield {**event, "bp": "e"} if phase == "f" else event
    for rank, profile in profiles:
        yield from _profile_events(rank, profile, clocks, zero_s)


def _pid(rank: int) -> int:
    return _LAUNCHER_PID if rank == LAUNCHER else rank


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _profiles(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rank and content of every trace of torch.profiler under the folder."""
    for path in sorted([*folder.rglob("*.trace.json"), *folder.rglob("*.trace.json.gz")]):
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rt", encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
            raise IoError("a profile cannot be read", hint="remove it, or export it again", path=str(path)) from error
        info = content.get("distributedInfo") if isinstance(content, dict) else None
        rank = info.get("rank") if isinstance(info, dict) else None
        times = content.get("baseTimeNanoseconds") if isinstance(content, dict) else None
        if not isinstance(rank, int) or not isinstance(times, int | float):
            raise IoError(
                "a profile does not say of which rank it is",
                hint="export it while the process group is up: torch writes distributedInfo then",
                path=str(path),
            )
        yield rank, content


def _profile_events(rank: int, profile: dict[str, Any], clocks: RankClocks, zero_s: float) -> Iterable[TraceEvent]:
    """The events of a profile, on the common clock, on tracks of the same rank."""
    base_us = profile["baseTimeNanoseconds"] / 1e3
    shift_us = base_us - (clocks.skews_s.get(rank, 0.0) + zero_s) * 1e6
    tids: dict[Any, int] = {}
    listed = profile.get("traceEvents")
    for event in listed if isinstance(listed, list) else []:
        is_event = isinstance(event, dict) and event.get("ph") in ("X", "i", "s", "f", "t")
        if not is_event or not isinstance(event.get("ts"), int | float):
            continue
        key = (str(event.get("pid")), str(event.get("tid")))
        if key not in tids:
            tids[key] = _PROFILER_TRACK + len(tids)
            name = f"torch: {event.get('cat', '')} {event.get('tid')}"
            yield {"ph": "M", "pid": rank, "tid": tids[key], "name": "thread_name", "args": {"name": name}}
        moved = {**event, "pid": rank, "tid": tids[key], "ts": round(event["ts"] + shift_us, 3)}
        if "id" in moved:
            moved["id"] = f"torch-{rank}-{moved['id']}"
        yield moved
