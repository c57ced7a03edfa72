"""What the ranks of a recorded run said that they do without, with gains in the run's own seconds and bytes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torsh_distributed.observe.bottlenecks.device_use import DeviceUse
from torsh_distributed.observe.trace.event_files import Record, RecordedRun

_WAITS = ("wait", "data", "bubble")
_LEAST_SHARE = 0.01
"""Of a step: a change that saves less is not worth a line."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A setting with a known gain that the run did without."""

    title: str
    evidence: str
    plan_change: str
    gain_s: float | None
    """Seconds of the mean step; None if it saves memory alone."""
    gain_bytes: int | None = None
    """Of a rank's peak."""
    is_bound: bool = False


def recorded_suggestions(
    run: RecordedRun, parts: Mapping[str, float], num_steps: int, use: DeviceUse
) -> Iterator[Suggestion]:
    """Each once, though every engine of a run repeats it, and only where the run's memory calls for it.

    `parts` are the seconds of the mean step, which has `num_steps` others beside it on each rank.
    """
    step_s = sum(parts.values())
    shares = {
        "step": step_s,
        "busy": step_s - sum(parts[name] for name in _WAITS),
        "bubble": parts["bubble"],
        "forward": _forward_s(run, num_steps),
    }
    for record in {record["title"]: record for _, record in run.of("suggestion")}.values():
        found = _suggestion(record, shares, step_s)
        if record["takes_memory"] and not use.has_free_memory:
            continue
        saves_memory = found.gain_bytes is not None and use.is_short_of_memory
        if saves_memory or (found.gain_s or 0.0) >= _LEAST_SHARE * step_s:
            yield found


def _suggestion(record: Record, shares: Mapping[str, float], step_s: float) -> Suggestion:
    share, gain_s, told = record["gain"], record["gain_s"], record["evidence"]
    if share is not None:
        part = record["part"] if record["part"] in shares else "step"
        gain_s = share * shares[part]
        if part != "step":
            told += f"; {share:.0%} of the {shares[part] * 1e3:.1f} ms that a step spends {_NAMES[part]}"
    return Suggestion(
        title=record["title"],
        evidence=told,
        plan_change=record["plan_change"],
        gain_s=None if gain_s is None else min(gain_s, step_s),
        gain_bytes=record["gain_bytes"],
        is_bound=record["is_bound"],
    )


_NAMES = {"busy": "without waiting", "bubble": "in the pipeline's bubble", "forward": "in forward"}


def _forward_s(run: RecordedRun, num_steps: int) -> float:
    """Seconds of forward in a step, as a mean over the ranks."""
    by_rank: dict[int, float] = {}
    for rank, record in run.of("phase"):
        if record["phase"] == "forward":
            by_rank[rank] = by_rank.get(rank, 0.0) + record["duration_s"]
    # Steps are counted without the first one, phases with it.
    return statistics.fmean(by_rank.values()) / (num_steps + 1) if by_rank else 0.0
