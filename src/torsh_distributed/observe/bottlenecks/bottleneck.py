"""What a run spends its time on: bottlenecks with evidence, and a confidence that can be low. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from torsh_distributed.errors import IoError
from torsh_distributed.observe.bottlenecks.device_use import DeviceUse, recorded_use
from torsh_distributed.observe.bottlenecks.recorded_suggestions import Suggestion, recorded_suggestions
from torsh_distributed.observe.bottlenecks.step_times import (
    Arrivals,
    RecordedStep,
    arrivals,
    mean_parts,
    relative_error,
    step_times,
)
from torsh_distributed.observe.trace.event_files import RecordedRun, align_clocks, read_run
from torsh_distributed.observe.trace.timeline import slices_of

_WORTH_TELLING = 0.1
_HIGH = 0.3
_CRITICAL = 0.5
_ENOUGH_STEPS = 10


class BottleneckType(StrEnum):
    """What a run is held up by."""

    COMMUNICATION = "communication"
    SYNCHRONIZATION = "synchronization"
    LOAD_IMBALANCE = "load imbalance"
    COMPUTE = "compute"
    IO = "input"
    MEMORY = "memory"
    BUBBLE = "pipeline bubble"
    IDLE_GPU = "idle GPU"
    OTHER = "outside the step's phases"


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """One reason why steps take as long as they do."""

    kind: BottleneckType
    share: float
    """Of the mean step."""
    seconds: float
    """Of the mean step."""
    confidence: float
    """0 to 1: from the number of steps and how much they differ."""
    evidence: str
    ranks: tuple[int, ...] = ()
    """The ranks it is about; all if empty."""

    @property
    def severity(self) -> str:
        """low, high or critical."""
        return "critical" if self.share >= _CRITICAL else "high" if self.share >= _HIGH else "low"


@dataclass(frozen=True, kw_only=True)
class RunAnalysis:
    """What the events of a run say about its steps."""

    num_ranks: int
    num_steps: int
    """Measured ones, on rank 0."""
    step_s: float
    """The mean step."""
    parts: dict[str, float]
    """Seconds of the mean step by part, over all ranks; `wait` is split into `transfer` and `sync`."""
    by_rank: dict[int, dict[str, float]]
    arrivals: Arrivals
    bytes_per_step: float
    operations_per_step: float
    samples_per_step: float | None = None
    """Of all ranks; None where nobody told."""
    passes_per_step: float = 0.0
    """Forward passes of a rank; 0 where they are not seen."""
    use: DeviceUse = field(default_factory=DeviceUse)
    bottlenecks: tuple[Bottleneck, ...] = field(default=())
    suggestions: tuple[Suggestion, ...] = field(default=())
    """What the ranks do without, of what is known to pay."""


def analyse(folder: Path) -> RunAnalysis:
    """Read a run's events and judge them. Raises IoError if it recorded no steps."""
    run = read_run(folder)
    clocks = align_clocks(run)
    times = {rank: steps for rank, steps in step_times(run, clocks).items() if steps}
    if not times:
        raise IoError(
            "the run has no steps to compare",
            hint="record at least three steps, with `torsh run --trace DIR`",
            path=str(folder),
        )
    first = min(times)
    found = arrivals(slices_of(run, clocks), times[first][0].start_s, [one.end_s for one in times[first]])
    every = [one for steps in times.values() for one in steps]
    step_s = statistics.fmean(one.step_s for one in every)
    parts, use = mean_parts(every), recorded_use(run)
    num_steps = len(times[first])
    samples = [one.num_samples for one in every if one.num_samples is not None]
    analysis = RunAnalysis(
        num_ranks=len(run.ranks),
        num_steps=num_steps,
        step_s=step_s,
        parts=with_split_waits(parts, found, num_steps),
        by_rank={rank: mean_parts(steps) for rank, steps in times.items()},
        arrivals=found,
        bytes_per_step=statistics.fmean(one.num_bytes for one in every),
        operations_per_step=statistics.fmean(one.num_operations for one in every),
        samples_per_step=statistics.fmean(samples) if samples else None,
        passes_per_step=statistics.fmean(one.num_passes for one in every),
        use=use,
        suggestions=tuple(recorded_suggestions(run, parts, num_steps, use)),
    )
    return with_bottlenecks(analysis, every, _of_memory(run, use))


def with_split_waits(parts: Mapping[str, float], late: Arrivals, num_steps: int) -> dict[str, float]:
    """The parts with `wait` split into `sync`, waiting for late ranks, and `transfer`, the rest of it."""
    sync_s = min(parts["wait"], statistics.fmean(late.waited_s.values()) / num_steps if late.waited_s else 0.0)
    rest = {name: value for name, value in parts.items() if name != "wait"}
    return {**rest, "sync": sync_s, "transfer": parts["wait"] - sync_s}


def with_bottlenecks(
    analysis: RunAnalysis, every: Sequence[RecordedStep], further: Iterable[Bottleneck] = ()
) -> RunAnalysis:
    """The analysis with what holds its steps up, the largest share first; `every` are the steps of all ranks."""
    found = sorted([*_bottlenecks(analysis, every), *further], key=lambda one: -one.share)
    return replace(analysis, bottlenecks=tuple(found))


def _bottlenecks(found: RunAnalysis, every: Sequence[RecordedStep]) -> Iterator[Bottleneck]:
    def confidence(part: str) -> float:
        spread = relative_error([one.parts[part] for one in every])
        return round((1 - spread) * min(1.0, found.num_steps / _ENOUGH_STEPS), 2)

    def share(part: str) -> float:
        return found.parts[part] / found.step_s

    if share("transfer") >= _WORTH_TELLING:
        rate = found.bytes_per_step / found.parts["transfer"] / 1e9
        yield Bottleneck(
            kind=BottleneckType.COMMUNICATION,
            share=share("transfer"),
            seconds=found.parts["transfer"],
            confidence=confidence("wait"),
            evidence=f"{found.operations_per_step:.0f} operations and {found.bytes_per_step / 2**20:.1f} MiB a step, "
            f"{found.parts['transfer'] * 1e3:.1f} ms waited after all ranks had come ({rate:.2f} GB/s)",
        )
    yield from _of_waits(found, confidence("wait"))
    if share("data") >= _WORTH_TELLING:
        worst = max(found.by_rank, key=lambda rank: found.by_rank[rank]["data"])
        yield Bottleneck(
            kind=BottleneckType.IO,
            share=share("data"),
            seconds=found.parts["data"],
            confidence=confidence("data"),
            evidence=f"{found.parts['data'] * 1e3:.1f} ms a step waiting for the next batch, most on rank {worst} "
            f"({found.by_rank[worst]['data'] * 1e3:.1f} ms)",
        )
    if share("bubble") >= _WORTH_TELLING:
        yield Bottleneck(
            kind=BottleneckType.BUBBLE,
            share=share("bubble"),
            seconds=found.parts["bubble"],
            confidence=confidence("bubble"),
            evidence=f"stages stand still {found.parts['bubble'] * 1e3:.1f} ms a step, waiting for other stages",
        )
    if share("compute") + share("optimizer") >= _CRITICAL:
        seconds = found.parts["compute"] + found.parts["optimizer"]
        yield Bottleneck(
            kind=BottleneckType.COMPUTE,
            share=seconds / found.step_s,
            seconds=seconds,
            confidence=confidence("compute"),
            evidence=f"forward and backward {found.parts['compute'] * 1e3:.1f} ms, optimizer "
            f"{found.parts['optimizer'] * 1e3:.1f} ms of {found.step_s * 1e3:.1f} ms",
        )
    if share("other") >= 2 * _WORTH_TELLING:
        yield Bottleneck(
            kind=BottleneckType.OTHER,
            share=share("other"),
            seconds=found.parts["other"],
            confidence=confidence("other"),
            evidence=f"{found.parts['other'] * 1e3:.1f} ms a step between the phases: logging, evaluation, saving, or "
            "pauses under a cap on power",
        )
    yield from _of_idleness(found)


def _of_idleness(found: RunAnalysis) -> Iterator[Bottleneck]:
    """Time in which GPUs have nothing to do though nothing is waited for: the host does not give them work in time."""
    busy, readings = found.use.gpu_busy_share, list(found.use.gpu_ratios)
    if busy is None:
        return
    waits_s = sum(found.parts[part] for part in ("transfer", "sync", "data", "bubble"))
    idle_s = (1 - busy) * found.step_s - waits_s
    if idle_s < 2 * _WORTH_TELLING * found.step_s:
        return
    yield Bottleneck(
        kind=BottleneckType.IDLE_GPU,
        share=idle_s / found.step_s,
        seconds=idle_s,
        confidence=round((1 - relative_error([1 - one for one in readings])) * min(1.0, len(readings) / 10), 2),
        evidence=f"GPUs run kernels {busy:.0%} of the time ({len(readings)} readings); waiting for others or for data "
        f"does not explain {idle_s * 1e3:.1f} ms of a step without",
    )


def _of_waits(found: RunAnalysis, confidence: float) -> Iterator[Bottleneck]:
    """Waiting for ranks that come late: by name if it is one of them."""
    share = found.parts["sync"] / found.step_s
    if share < _WORTH_TELLING:
        return
    late = found.arrivals
    rank = late.straggler
    if rank is None:
        yield Bottleneck(
            kind=BottleneckType.SYNCHRONIZATION,
            share=share,
            seconds=found.parts["sync"],
            confidence=confidence,
            evidence=f"{found.parts['sync'] * 1e3:.1f} ms a step waiting for late ranks, no rank more than others",
        )
        return
    delays = late.delays_by_step[rank]
    sure = (1 - relative_error(delays)) * min(1.0, found.num_steps / _ENOUGH_STEPS)
    yield Bottleneck(
        kind=BottleneckType.LOAD_IMBALANCE,
        share=share,
        seconds=found.parts["sync"],
        confidence=round(sure, 2),
        evidence=f"rank {rank} comes last to {late.last_share[rank]:.0%} of {late.num_collectives} collectives and "
        f"delays each step by {late.delay_s[rank] / found.num_steps * 1e3:.1f} ms; {_why_late(found, rank)}",
        ranks=(rank,),
    )


def _why_late(found: RunAnalysis, rank: int) -> str:
    """In which part the slow rank takes longer than the others."""
    mine = found.by_rank[rank]
    others = [parts for one, parts in found.by_rank.items() if one != rank]
    extra = {
        part: mine[part] - statistics.fmean(one[part] for one in others)
        for part in ("compute", "data", "optimizer", "other")
    }
    part = max(extra, key=lambda one: extra[one])
    return f"its {part} takes {extra[part] * 1e3:.1f} ms longer than the others'"


def _of_memory(run: RecordedRun, use: DeviceUse) -> Iterator[Bottleneck]:
    told = [use.fullest.evidence] if use.fullest is not None and use.is_short_of_memory else []
    pressed = [record for _, record in run.of("pressure")]
    if pressed:
        worst = max(pressed, key=lambda record: record["before_bytes"] / max(1, record["budget_bytes"]))
        told.append(
            f"{len(pressed)} times {worst['memory']} ran short of its budget "
            f"({worst['before_bytes'] / 2**20:.0f} of {worst['budget_bytes'] / 2**20:.0f} MiB)"
        )
    if told:
        yield Bottleneck(kind=BottleneckType.MEMORY, share=0.0, seconds=0.0, confidence=1.0, evidence="; ".join(told))
