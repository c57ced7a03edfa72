"""What to change, and how much faster a step then is: computed from the measurements shown beside it. Pure."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torsh_distributed.observe.bottlenecks.bottleneck import Bottleneck, BottleneckType, RunAnalysis
from torsh_distributed.observe.bottlenecks.recorded_suggestions import Suggestion
from torsh_distributed.observe.loops.after_import import LOADER_WORKERS_VARIABLE

_SMALL_BYTES = 1 << 20
_MANY_OPERATIONS = 8
_FEW_OPERATIONS = 2
_SLOW_GBPS = 2.0
_MOST_LOADERS = 8
_FORBID_LARGER_PASSES = {BottleneckType.MEMORY, BottleneckType.IDLE_GPU}
"""Without the memory for them, or with their gain reckoned already."""
_INT8_RATIO = 4 / (1 + 4 / 256)
"""fp32 gradients against int8 with a scale for every 256."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """One change, with the gain it should bring."""

    title: str
    gain_s: float | None
    """Seconds off the mean step, for as many samples as it has now; None if it follows from nothing that was measured:
    `torsh tune` measures it."""
    reckoning: str
    """How the gain follows from what was measured."""
    gain_bytes: int | None = None
    """What it saves of a rank's memory at the peak, for a change that is about memory."""
    is_bound: bool = False
    """Whether the gain is the most there can be: a cost of the change was not measured."""
    plan_change: str = ""
    """The change as text of a plan; empty if it does not change a plan."""
    overrides: dict[str, str] = field(default_factory=dict)
    """The same as variables, for `torsh tune`; empty if nobody but the user can make the change."""
    confidence: float = 1.0
    caution: str = ""


def recommend(found: RunAnalysis) -> list[Recommendation]:
    """What is worth trying, the largest gain first, then what is to be measured."""
    return sorted(_all(found), key=lambda one: -(one.gain_s or 0.0))


def _all(found: RunAnalysis) -> Iterator[Recommendation]:
    yield from map(_of_suggestion, found.suggestions)
    kinds = {one.kind for one in found.bottlenecks}
    for bottleneck in found.bottlenecks:
        match bottleneck.kind:
            case BottleneckType.COMMUNICATION:
                yield from _of_communication(found, bottleneck.confidence)
            case BottleneckType.LOAD_IMBALANCE:
                yield _of_late_rank(found, bottleneck)
            case BottleneckType.IO:
                yield _of_loading(found, bottleneck.confidence)
            case BottleneckType.IDLE_GPU if BottleneckType.MEMORY not in kinds:
                yield _of_idle_gpus(found, bottleneck)
            case BottleneckType.COMPUTE if found.passes_per_step >= 2 and not kinds & _FORBID_LARGER_PASSES:
                yield _of_passes(found, bottleneck.confidence)


def _of_suggestion(one: Suggestion) -> Recommendation:
    return Recommendation(
        title=one.title,
        gain_s=one.gain_s,
        reckoning=one.evidence,
        gain_bytes=one.gain_bytes,
        is_bound=one.is_bound,
        plan_change=one.plan_change,
        overrides=plan_variables(one.plan_change),
    )


def plan_variables(plan_change: str) -> dict[str, str]:
    """The variables that say the same as sections of a plan."""
    return {
        f"TORSH_PLAN__{section.upper()}__{key.upper()}": str(value).lower() if isinstance(value, bool) else str(value)
        for section, keys in tomllib.loads(plan_change).items()
        for key, value in keys.items()
    }


def _of_late_rank(found: RunAnalysis, bottleneck: Bottleneck) -> Recommendation:
    (rank,) = bottleneck.ranks
    late = found.arrivals
    # Operations that overlap count one delay several times; nobody gains more than it waited.
    others = [parts["wait"] for one, parts in found.by_rank.items() if one != rank]
    delay_s = min(late.delay_s[rank] / found.num_steps, sum(others) / len(others))
    return Recommendation(
        title=f"make rank {rank} as fast as the others, or give it less work",
        gain_s=delay_s,
        reckoning=f"without it the last but one sets the pace: {delay_s * 1e3:.1f} ms a step earlier",
        confidence=bottleneck.confidence,
        caution="look at that machine: other programs, heat, a slower disk or link, uneven batches",
    )


def _of_loading(found: RunAnalysis, confidence: float) -> Recommendation:
    """As many processes as keep up with the rest of the step."""
    data_s = found.parts["data"]
    rest_s = max(found.step_s - data_s, 1e-6)
    # With some to spare: loading times vary, and a late batch stops the step.
    num_workers = min(_MOST_LOADERS, max(2, math.ceil(1.25 * data_s / rest_s)))
    loaded_s = data_s / num_workers
    after = f"{num_workers} processes need {loaded_s * 1e3:.1f} ms of it a step, beside {rest_s * 1e3:.1f} ms"
    return Recommendation(
        title=f"load in processes of its own: DataLoader(num_workers={num_workers}, persistent_workers=True)",
        gain_s=found.step_s - max(rest_s, loaded_s),
        reckoning=f"loading a batch takes {data_s * 1e3:.1f} ms in the training process; {after} of everything else",
        is_bound=True,
        overrides={LOADER_WORKERS_VARIABLE: str(num_workers)},
        confidence=confidence,
        caution="if loading computes, these processes need cores of their own; if they exist already, double them",
    )


def _of_idle_gpus(found: RunAnalysis, bottleneck: Bottleneck) -> Recommendation:
    """More work for each launch: the GPU then has some while the host prepares the next."""
    now = round(found.passes_per_step)
    fewer = now // 2
    change = f"[training]\ngradient_accumulation = {fewer}" if fewer else ""
    return Recommendation(
        title=f"do a batch in {fewer} pass{'es' if fewer > 1 else ''}, not in {now}" if fewer else "larger batches",
        gain_s=bottleneck.seconds,
        reckoning=f"{bottleneck.seconds * 1e3:.1f} ms of a step without a kernel: larger ones may fill them",
        is_bound=True,
        plan_change=change,
        overrides=plan_variables(change),
        confidence=bottleneck.confidence,
        caution="a larger pass needs more memory; [compile] with cuda_graphs, and fewer .item() calls, help as well",
    )


def _of_passes(found: RunAnalysis, confidence: float) -> Recommendation:
    now = round(found.passes_per_step)
    fewer = max(1, now // 2)
    return Recommendation(
        title=f"do a batch in {fewer} pass{'es' if fewer > 1 else ''}, not in {now}",
        gain_s=None,
        reckoning=f"{found.parts['compute'] * 1e3:.1f} ms in {now} passes; what a pass costs besides its samples is "
        "not known before it is tried",
        plan_change=f"[training]\ngradient_accumulation = {fewer}",
        overrides={"TORSH_PLAN__TRAINING__GRADIENT_ACCUMULATION": str(fewer)},
        confidence=confidence,
        caution="a larger pass needs more memory",
    )


def _of_communication(found: RunAnalysis, confidence: float) -> Iterator[Recommendation]:
    transfer_s = found.parts["transfer"]
    if found.samples_per_step:
        batch, passes = 2 * round(found.samples_per_step), 2 * max(1, round(found.passes_per_step))
        yield Recommendation(
            title=f"update after {batch} samples, in twice as many passes",
            gain_s=transfer_s / 2,
            reckoning=f"{transfer_s * 1e3:.1f} ms of transfer for twice as many samples: half of it for each",
            plan_change=f"[training]\nbatch_size = {batch}\ngradient_accumulation = {passes}",
            overrides={
                "TORSH_PLAN__TRAINING__BATCH_SIZE": str(batch),
                "TORSH_PLAN__TRAINING__GRADIENT_ACCUMULATION": str(passes),
            },
            confidence=confidence,
            caution="half as many updates: the learning rate may need to follow",
        )
    gbps = 8 * found.bytes_per_step / transfer_s / 1e9
    if gbps < _SLOW_GBPS and found.bytes_per_step > _SMALL_BYTES:
        yield Recommendation(
            title="send gradients as int8",
            gain_s=transfer_s * (1 - 1 / _INT8_RATIO),
            reckoning=f"1/{_INT8_RATIO:.1f} of {found.bytes_per_step / 2**20:.1f} MiB at {gbps:.2f} Gbit/s; "
            "encoding is not counted",
            is_bound=True,
            plan_change='[compress]\nmethod = "int8"',
            # The steps that are compared are those after the warm-up.
            overrides={"TORSH_PLAN__COMPRESS__METHOD": "int8", "TORSH_PLAN__COMPRESS__WARMUP_STEPS": "0"},
            confidence=confidence,
            caution="changes gradients within rounding; error feedback keeps it from adding up",
        )
    per_operation = found.bytes_per_step / max(1.0, found.operations_per_step)
    if found.operations_per_step >= _MANY_OPERATIONS and per_operation < _SMALL_BYTES:
        yield _of_many_operations(found, per_operation, confidence)


def _of_many_operations(found: RunAnalysis, per_operation: float, confidence: float) -> Recommendation:
    """Fewer of them: each costs at least what a small one takes, and none of that is hidden where steps wait for it."""
    transfer_s, latency_s = found.parts["transfer"], found.arrivals.latency_s
    num_saved = found.operations_per_step - _FEW_OPERATIONS
    told = f"{found.operations_per_step:.0f} operations of {per_operation / 1024:.0f} KiB"
    if latency_s is None:
        gain_s = transfer_s * num_saved / found.operations_per_step
        told += f"; {_FEW_OPERATIONS} would pay the latency {_FEW_OPERATIONS} times"
    else:
        gain_s = min(transfer_s, num_saved * latency_s)
        told += f"; a small one takes {latency_s * 1e6:.0f} µs, and {num_saved:.0f} of them are saved"
    return Recommendation(
        title="send fewer, larger messages",
        gain_s=gain_s,
        reckoning=told,
        is_bound=True,
        plan_change="[ddp]\nmax_bucket_size_mb = 50\nmin_bucket_size_mb = 25",
        overrides={"TORSH_PLAN__DDP__MAX_BUCKET_SIZE_MB": "50", "TORSH_PLAN__DDP__MIN_BUCKET_SIZE_MB": "25"},
        confidence=confidence,
    )
