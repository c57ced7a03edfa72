"""Where the time of each step went, on each rank, from recorded events. Every moment counts once. Pure."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torsh_distributed.comm.recording.span_account import PART_OF_PHASE, POINT_TO_POINT, SpanAccount, covered_s
from torsh_distributed.observe.trace.event_files import RankClocks, Record, RecordedRun
from torsh_distributed.observe.trace.timeline import TraceSlice, links

CLEARLY_LATE_S = 50e-6
"""Less is chance."""
_SMALL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """What the collectives of a run say about its ranks."""

    num_collectives: int
    waited_s: dict[int, float]
    """By rank: seconds it waited in collectives for others to come."""
    delay_s: dict[int, float]
    """By rank: seconds by which it came after all others, where it came last."""
    last_share: dict[int, float]
    """By rank: the share of collectives to which it came last and clearly so."""
    delays_by_step: dict[int, list[float]]
    """By rank: the seconds it delayed the others, one number for each step."""
    latency_s: float | None = None
    """Seconds that a small operation takes once all ranks have come; None if there was none."""

    @property
    def straggler(self) -> int | None:
        """The rank that delays the others most, if it is one rank that does."""
        total = sum(self.delay_s.values())
        if not total:
            return None
        rank = max(self.delay_s, key=lambda one: self.delay_s[one])
        return rank if self.delay_s[rank] > 0.6 * total and self.last_share[rank] > 0.5 / len(self.delay_s) else None


def arrivals(slices: Iterable[TraceSlice], start_s: float, step_ends_s: list[float]) -> Arrivals:
    """Compare the ranks at every linked collective from `start_s` on; `step_ends_s` are the ends of a rank's steps."""
    # By rank and step: operations that are under way together count one delay once.
    waits: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    gaps: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    lasts: Counter[int] = Counter()
    count = 0
    small_s: list[float] = []
    ranks: set[int] = set()
    for together in links([one for one in slices if one.start_s >= start_s]):
        count += 1
        *others, last = together
        if 0 < last.facts.get("num_bytes", 0) <= _SMALL_BYTES:
            small_s.append(max(one.end_s for one in together) - last.start_s)
        ranks.update(one.rank for one in together)
        at = bisect.bisect_left(step_ends_s, last.start_s)
        for one in others:
            waits[one.rank, at].append((one.start_s, min(last.start_s, one.end_s)))
        # The others would have begun when the last but one came.
        gaps[last.rank, at].append((others[-1].start_s, last.start_s))
        lasts[last.rank] += last.start_s - others[-1].start_s > CLEARLY_LATE_S
    waited: defaultdict[int, float] = defaultdict(float)
    for (rank, _), spans in waits.items():
        waited[rank] += covered_s(spans)
    delay: defaultdict[int, float] = defaultdict(float)
    by_step: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * len(step_ends_s))
    for (rank, at), spans in gaps.items():
        delay[rank] += covered_s(spans)
        if at < len(step_ends_s):
            by_step[rank][at] = covered_s(spans)
    return Arrivals(
        num_collectives=count,
        waited_s={rank: waited[rank] for rank in sorted(ranks)},
        delay_s={rank: delay[rank] for rank in sorted(ranks)},
        last_share={rank: lasts[rank] / count for rank in sorted(ranks)} if count else {},
        delays_by_step={rank: by_step[rank] for rank in sorted(ranks)},
        latency_s=statistics.median(small_s) if small_s else None,
    )


def relative_error(values: list[float]) -> float:
    """Two standard errors of the mean, relative to it; 1 if there are too few values to tell."""
    if len(values) < 3 or not statistics.fmean(values):
        return 1.0
    return min(1.0, 2 * statistics.stdev(values) / math.sqrt(len(values)) / abs(statistics.fmean(values)))


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
