"""An analysis as people read it: where the time goes, what holds the run up, what to do."""

from __future__ import annotations

from collections.abc import Iterable

from torsh_distributed.observe.bottlenecks.bottleneck import RunAnalysis
from torsh_distributed.observe.bottlenecks.recommendation import Recommendation

_LABELS = {
    "compute": "computing",
    "transfer": "transferring",
    "sync": "waiting for late ranks",
    "data": "loading",
    "optimizer": "updating",
    "bubble": "pipeline bubble",
    "other": "between phases",
}

_UNKNOWN = "gain unknown before `torsh tune` has measured it"


def summary_lines(found: RunAnalysis) -> list[str]:
    """Where the time goes."""
    lines = [f"{found.num_ranks} ranks, {found.num_steps} steps after the first, {found.step_s * 1e3:.2f} ms a step"]
    for part, label in _LABELS.items():
        seconds = found.parts[part]
        if seconds / found.step_s >= 0.005:
            lines.append(f"  {label:<22} {seconds * 1e3:9.2f} ms  {seconds / found.step_s:6.1%}")
    lines.append("rank   compute      wait      data  optimizer     other   came last   delayed the others")
    for rank, parts in sorted(found.by_rank.items()):
        numbers = "".join(f"{parts[part] * 1e3:10.2f}" for part in ("compute", "wait", "data", "optimizer", "other"))
        late = found.arrivals
        last = f"{late.last_share.get(rank, 0.0):10.0%}"
        lines.append(f"{rank:>4}{numbers}{last}  {late.delay_s.get(rank, 0.0) / found.num_steps * 1e3:9.2f} ms a step")
    return lines


def bottleneck_lines(found: RunAnalysis) -> list[str]:
    """What holds the run up."""
    if not found.bottlenecks:
        return ["nothing stands out: no part takes a tenth of the step by itself"]
    return [
        f"{one.kind.value}: {one.share:.0%} of the step ({one.severity}, confidence {one.confidence:.2f}); "
        f"{one.evidence}"
        for one in found.bottlenecks
    ]


def recommendation_lines(advice: Iterable[Recommendation], step_s: float) -> list[str]:
    """What to do, numbered as `torsh tune --apply` takes it."""
    lines = []
    for number, one in enumerate(advice, 1):
        most = "up to " if one.is_bound else ""
        gain = f"{most}{one.gain_s * 1e3:.2f} ms a step, {most}{one.gain_s / step_s:.0%}" if one.gain_s else _UNKNOWN
        lines.append(f"{number}. {one.title}: {gain} (confidence {one.confidence:.2f})")
        lines.append(f"   {one.reckoning}")
        if one.caution:
            lines.append(f"   {one.caution}")
        lines += [f"   {line}" for line in one.plan_change.splitlines()]
    return lines or ["no change is worth a recommendation"]
