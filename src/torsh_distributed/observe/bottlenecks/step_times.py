"""Where the time of each step went, on each rank, from recorded events. Every moment counts once. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torsh_distributed.comm.recording.span_account import PART_OF_PHASE, POINT_TO_POINT, SpanAccount
from torsh_distributed.observe.trace.event_files import Record, RecordedRun
from torsh_distributed.observe.trace.rank_clocks import RankClocks

PARTS = ("compute", "wait", "data", "optimizer", "bubble", "other")


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
    spans = SpanAccount(steps[0].start_s, bubble_waits=POINT_TO_POINT)
    at = 0
    # By their ends, inner ones first, as they were emitted.
    for record in sorted((one for one in records if one["type"] in ("phase", "wait")), key=_end_s):
        end_s = clocks.from_monotonic(rank, _end_s(record)[0])
        # The last phase ends just before the event of its step.
        while at < len(steps) and steps[at].end_s < end_s - 1e-4:
            _end_step(steps[at], spans)
            at += 1
        if at == len(steps):
            break
        is_wait = record["type"] == "wait"
        if is_wait:
            steps[at].num_operations += record["num_started"]
            steps[at].num_bytes += record["num_bytes"]
        if record.get("thread") not in (thread, None):
            continue  # beside the training thread: it delays nobody by itself
        steps[at].num_passes += record.get("phase") == "forward"
        add = spans.add_wait if is_wait else spans.add_phase
        add(record["op" if is_wait else "phase"], end_s - record["duration_s"], record["duration_s"])
    for step in steps[at:]:
        _end_step(step, spans)
    return steps


def _end_step(step: RecordedStep, spans: SpanAccount) -> None:
    ended = spans.end_step(step.end_s)
    step.parts["wait"] += sum(ended.waits.values())
    for phase, seconds in ended.phases.items():
        step.parts[PART_OF_PHASE.get(phase, "other")] += max(0.0, seconds)


def _end_s(record: Record) -> tuple[float, float]:
    return float(record["start_s"] + record["duration_s"]), -record["start_s"]


def _training_thread(records: Iterable[Record]) -> int | None:
    threads = Counter(record.get("thread") for record in records if record["type"] == "phase")
    return threads.most_common(1)[0][0] if threads else None


def mean_parts(steps: Iterable[RecordedStep]) -> dict[str, float]:
    """The mean step: seconds by part."""
    every = list(steps)
    return {part: statistics.fmean(one.parts[part] for one in every) for part in PARTS} if every else {}
