"""Who comes last to collectives, and how long the others wait for it. Pure."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torsh_distributed.comm.recording.intervals import covered_s
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
