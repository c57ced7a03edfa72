"""Where the time of each step went, on each rank, from recorded events. Every moment counts once. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torsh_distributed.observe.trace.event_files import Record, RecordedRun
from torsh_distributed.observe.trace.rank_clocks import RankClocks

PARTS = ("compute", "wait", "data", "optimizer", "bubble", "other")
_PART_OF_PHASE = {
    "forward": "compute",
    "backward": "compute",
    "stage": "compute",
    "schedule": "bubble",
    "optimizer": "optimizer",
    "data": "data",
}


@dataclass
class RecordedStep:
    """One step of one rank, from the end of the step before; seconds by part."""

    rank: int
    step: int
    start_s: float
    """On the common clock."""
    end_s: float
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_samples: int | None = None
    """Of all ranks."""
    num_passes: int = 0
    """Forward passes."""
    num_operations: int = 0
    num_bytes: int = 0
    """Of the operations that were started."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.end_s - self.start_s


def step_times(run: RecordedRun, clocks: RankClocks) -> dict[int, list[RecordedStep]]:
    """By rank, without each rank's first step: it compiles, allocates and connects."""
    return {rank: _of_rank(rank, records, clocks)[1:] for rank, records in run.ranks.items()}


def _of_rank(rank: int, records: list[Record], clocks: RankClocks) -> list[RecordedStep]:
    steps: list[RecordedStep] = []
    for record in records:
        if record["type"] == "step":
            end_s = clocks.from_wall(rank, record["time"])
            start_s = steps[-1].end_s if steps else end_s - record["duration_s"]
            steps.append(RecordedStep(rank, record["step"], start_s, end_s, num_samples=record.get("num_samples")))
    if not steps:
        return []
    thread = _training_thread(records)
    spans: defaultdict[int, list[tuple[float, float, str]]] = defaultdict(list)
    at = 0
    for record in sorted((one for one in records if one["type"] in ("phase", "wait")), key=_end_s):
        end_s = clocks.from_monotonic(rank, _end_s(record))
        # The last phase ends just before the event of its step.
        while at < len(steps) and steps[at].end_s < end_s - 1e-4:
            at += 1
        if at == len(steps):
            break
        if record["type"] == "wait":
            steps[at].num_operations += record["num_started"]
            steps[at].num_bytes += record["num_bytes"]
        if record.get("thread") not in (thread, None):
            continue  # beside the training thread: it delays nobody by itself
        steps[at].num_passes += record.get("phase") == "forward"
        part = "wait" if record["type"] == "wait" else _PART_OF_PHASE.get(record["phase"], "other")
        spans[at].append((max(end_s - record["duration_s"], steps[at].start_s), end_s, part))
    for number, found in spans.items():
        _book(steps[number], found)
    return steps


def _end_s(record: Record) -> float:
    return float(record["start_s"] + record["duration_s"])


def _training_thread(records: Iterable[Record]) -> int | None:
    threads = Counter(record.get("thread") for record in records if record["type"] == "phase")
    return threads.most_common(1)[0][0] if threads else None


def _book(step: RecordedStep, spans: list[tuple[float, float, str]]) -> None:
    """Add up nested spans: what is inside another counts for itself alone."""
    covered = 0.0
    open_spans: list[tuple[float, str]] = []  # (end, part), outermost first
    reached = step.start_s
    for start, end, part in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][0] <= start:
            finished, inner = open_spans.pop()
            covered += _add(step, inner, reached, finished)
            reached = max(reached, finished)
        if open_spans:
            covered += _add(step, open_spans[-1][1], reached, start)
        reached = max(reached, start)
        open_spans.append((end, part))
    while open_spans:
        finished, inner = open_spans.pop()
        covered += _add(step, inner, reached, finished)
        reached = max(reached, finished)
    step.parts["other"] += max(0.0, step.step_s - covered)


def _add(step: RecordedStep, part: str, start: float, end: float) -> float:
    seconds = max(0.0, min(end, step.end_s) - max(start, step.start_s))
    step.parts[part] += seconds
    return seconds


def mean_parts(steps: Iterable[RecordedStep]) -> dict[str, float]:
    """The mean step: seconds by part."""
    every = list(steps)
    return {part: statistics.fmean(one.parts[part] for one in every) for part in PARTS} if every else {}
