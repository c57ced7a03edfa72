"""The same judgement on a job that runs, from the steps its ranks have told: without a recording.

Collectives are not linked here. But the last rank to come to a step's collectives waits the least in that step, so what
the others wait beyond it is waiting for late ranks, and the rest is transfer.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torsh_distributed.observe.bottlenecks.bottleneck import RunAnalysis, with_bottlenecks, with_split_waits
from torsh_distributed.observe.bottlenecks.recommendation import recommend
from torsh_distributed.observe.bottlenecks.step_times import CLEARLY_LATE_S, Arrivals, RecordedStep, mean_parts
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.rank_view import RankView
from torsh_distributed.observe.metrics.step_record import StepRecord

_MOST_STEPS = 50
_LEAST_STEPS = 5
_MOST_RECORDS = 2560
_SHOWN_RANKS = 32
_ASKED_RANKS = 16

Steps = Mapping[int, Mapping[int, StepRecord]]
"""By rank and number."""


def analyse_live(view: JobView) -> RunAnalysis | None:
    """What the newest steps say; None while fewer than five are known of every rank."""
    with view.lock:
        window = max(_LEAST_STEPS, min(_MOST_STEPS, _MOST_RECORDS // max(1, len(view.ranks))))
        steps = {
            rank: {one.step: one for one in list(seen.steps)[-window:] if not one.is_skipped}
            for rank, seen in sorted(view.ranks.items())
            if seen.steps
        }
        common = sorted(set.intersection(*(set(one) for one in steps.values()))) if steps else []
        # The first step of a process allocates, compiles and connects.
        common = [number for number in common if number > 1]
        if len(common) < _LEAST_STEPS:
            return None
        num_operations, num_bytes = _communication(view)
        shares = {rank: _optimizer_share(view.ranks[rank]) for rank in steps}
    times = {rank: [_recorded(rank, one[number], shares[rank]) for number in common] for rank, one in steps.items()}
    every = [one for steps in times.values() for one in steps]
    found = _arrivals(steps, common)
    samples = [number for one in steps.values() for at in common if (number := one[at].num_samples) is not None]
    analysis = RunAnalysis(
        num_ranks=len(steps),
        num_steps=len(common),
        step_s=statistics.fmean(one.step_s for one in every),
        parts=with_split_waits(mean_parts(every), found, len(common)),
        by_rank={rank: mean_parts(one) for rank, one in times.items()},
        arrivals=found,
        bytes_per_step=num_bytes,
        operations_per_step=num_operations,
        samples_per_step=statistics.fmean(samples) if samples else None,
    )
    return with_bottlenecks(analysis, every)


def advice_rows(view: JobView) -> dict[str, list[dict[str, Any]]]:
    """For the page: what holds the job up, what to change, and who waits for whom."""
    found = analyse_live(view)
    if found is None:
        return {"bottlenecks": [], "recommendations": [], "waits": []}
    late, per_step = found.arrivals, 1 / found.num_steps
    rows = [
        {
            "rank": rank,
            "waits_s": late.waited_s[rank] * per_step,
            "delays_s": late.delay_s[rank] * per_step,
            "last_share": late.last_share[rank],
        }
        for rank in late.waited_s
    ]
    return {
        "bottlenecks": [
            {**asdict(one), "kind": one.kind.value, "severity": one.severity, "ranks": list(one.ranks)}
            for one in found.bottlenecks
        ],
        "recommendations": [asdict(one) for one in recommend(found)],
        "waits": sorted(rows, key=lambda row: -row["delays_s"])[:_SHOWN_RANKS],
    }


def _optimizer_share(seen: RankView) -> float:
    """Of the time in which a rank computes, by the steps that were looked at."""
    split = seen.split_steps
    optimizer_s = sum([one.optimizer_s or 0.0 for one in split])
    computed_s = sum([(one.forward_s or 0.0) + (one.backward_s or 0.0) + max(0.0, one.other_s) for one in split])
    return optimizer_s / (optimizer_s + computed_s) if optimizer_s > 0 else 0.0


def _recorded(rank: int, step: StepRecord, optimizer_share: float) -> RecordedStep:
    """The parts of a step. If it was not looked at, what is not waiting is computing, a share of it the optimizer."""
    found = RecordedStep(rank, step.step, step.time - step.step_s, step.time)
    is_split = step.forward_s is not None or step.backward_s is not None
    computed_s, optimizer_s = (step.forward_s or 0.0) + (step.backward_s or 0.0), step.optimizer_s or 0.0
    if not is_split:
        computed_s = max(0.0, step.other_s)
        if step.optimizer_s is None:
            optimizer_s = optimizer_share * computed_s
            computed_s -= optimizer_s
    found.parts |= {
        "compute": computed_s,
        "wait": step.wait_s or 0.0,
        "data": step.data_s or 0.0,
        "optimizer": optimizer_s,
        "bubble": step.bubble_s or 0.0,
        "other": max(0.0, step.other_s) if is_split else 0.0,
    }
    return found


def _arrivals(steps: Steps, common: Sequence[int]) -> Arrivals:
    waited: defaultdict[int, float] = defaultdict(float)
    delay: defaultdict[int, float] = defaultdict(float)
    lasts: defaultdict[int, int] = defaultdict(int)
    by_step: dict[int, list[float]] = {rank: [0.0] * len(common) for rank in steps}
    count = 0
    for at, number in enumerate(common):
        waits = {rank: seconds for rank, one in steps.items() if (seconds := one[number].wait_s) is not None}
        if len(waits) < 2 or len(waits) < len(steps):
            continue
        count += 1
        last = min(waits, key=lambda rank: waits[rank])
        gap_s = min(seconds for rank, seconds in waits.items() if rank != last) - waits[last]
        for rank, seconds in waits.items():
            waited[rank] += seconds - waits[last]
        delay[last] += gap_s
        lasts[last] += gap_s > CLEARLY_LATE_S
        by_step[last][at] += gap_s
    ranks = sorted(waited)
    return Arrivals(
        num_collectives=count,
        waited_s={rank: waited[rank] for rank in ranks},
        delay_s={rank: delay[rank] for rank in ranks},
        last_share={rank: lasts[rank] / count for rank in ranks},
        delays_by_step={rank: by_step[rank] for rank in ranks},
    )


def _communication(view: JobView) -> tuple[float, float]:
    """Operations and bytes a step, as a mean over some ranks."""
    found = [_of_rank(seen) for _, seen in sorted(view.ranks.items())[:_ASKED_RANKS]]
    known = [one for one in found if one is not None]
    if not known:
        return 0.0, 0.0
    return statistics.fmean(one[0] for one in known), statistics.fmean(one[1] for one in known)


def _of_rank(seen: RankView) -> tuple[float, float] | None:
    num_steps = seen.number("torsh_steps")
    if not num_steps:
        return None
    sums = {"torsh_collectives": 0.0, "torsh_collective_bytes": 0.0}
    for (name, _), value in seen.values(sums):
        sums[name] += value if isinstance(value, float) else 0.0
    return sums["torsh_collectives"] / num_steps, sums["torsh_collective_bytes"] / num_steps
