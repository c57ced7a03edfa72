"""What to change, and how much faster a step then is: computed from the measurements shown beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torsh_distributed.observe.bottlenecks.bottleneck import BottleneckType, RunAnalysis

_SMALL_BYTES = 1 << 20
_MANY_OPERATIONS = 8
_SLOW_GBPS = 2.0
_INT8_RATIO = 4 / (1 + 4 / 256)
"""fp32 gradients against int8 with a scale for every 256."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """One change, with the gain it should bring."""

    title: str
    gain_s: float
    """Seconds off the mean step."""
    reckoning: str
    """How the gain follows from what was measured."""
    is_bound: bool = False
    """Whether the gain is the most there can be: a cost of the change was not measured."""
    plan_change: str = ""
    """The change as text of a plan; empty if it is none of a plan."""
    overrides: dict[str, str] = field(default_factory=dict)
    """The same as variables, for `torsh tune`."""
    confidence: float = 1.0
    caution: str = ""


def recommend(found: RunAnalysis) -> list[Recommendation]:
    """What is worth trying, the largest gain first."""
    return sorted(_all(found), key=lambda one: -one.gain_s)


def _all(found: RunAnalysis) -> Iterator[Recommendation]:
    for bottleneck in found.bottlenecks:
        match bottleneck.kind:
            case BottleneckType.COMMUNICATION:
                yield from _of_communication(found, bottleneck.confidence)
            case BottleneckType.LOAD_IMBALANCE:
                (rank,) = bottleneck.ranks
                late = found.arrivals
                # Operations that overlap count one delay several times; nobody gains more than it waited.
                others = [parts["wait"] for one, parts in found.by_rank.items() if one != rank]
                delay_s = min(late.delay_s[rank] / found.num_steps, sum(others) / len(others))
                yield Recommendation(
                    title=f"make rank {rank} as fast as the others, or give it less work",
                    gain_s=delay_s,
                    reckoning=f"without it the last but one sets the pace: {delay_s * 1e3:.1f} ms a step earlier",
                    confidence=bottleneck.confidence,
                    caution="look at that machine: other programs, heat, a slower disk or link, uneven batches",
                )
            case BottleneckType.IO:
                hidden_s = min(found.parts["data"], found.parts["compute"])
                yield Recommendation(
                    title="load the next batch while this one computes: DataLoader(num_workers=2, prefetch_factor=2)",
                    gain_s=hidden_s,
                    reckoning=f"{found.parts['data'] * 1e3:.1f} ms of loading fit beside "
                    f"{found.parts['compute'] * 1e3:.1f} ms of computing",
                    is_bound=True,
                    confidence=bottleneck.confidence,
                    caution="loader processes need cores of their own",
                )


def _of_communication(found: RunAnalysis, confidence: float) -> Iterator[Recommendation]:
    transfer_s = found.parts["transfer"]
    yield Recommendation(
        title="send gradients every second batch",
        gain_s=transfer_s / 2,
        reckoning=f"half of {transfer_s * 1e3:.1f} ms of transfer for each batch",
        plan_change="[training]\ngradient_accumulation = 2",
        overrides={"TORSH_PLAN__TRAINING__GRADIENT_ACCUMULATION": "2"},
        confidence=confidence,
        caution="with the same number of samples an update: each batch is then cut into two parts",
        is_bound=True,
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
            overrides={"TORSH_PLAN__COMPRESS__METHOD": "int8"},
            confidence=confidence,
            caution="changes gradients within rounding; error feedback keeps it from adding up",
        )
    per_operation = found.bytes_per_step / max(1.0, found.operations_per_step)
    if found.operations_per_step >= _MANY_OPERATIONS and per_operation < _SMALL_BYTES:
        # Each operation costs at least the latency; what the bytes themselves take is at most the rest.
        saved = transfer_s * (1 - 1 / max(1.0, found.operations_per_step / 2))
        yield Recommendation(
            title="send fewer, larger messages",
            gain_s=saved,
            reckoning=f"{found.operations_per_step:.0f} operations of {per_operation / 1024:.0f} KiB; two would pay "
            "the latency twice",
            is_bound=True,
            plan_change="[ddp]\nmax_bucket_size_mb = 50\nmin_bucket_size_mb = 25",
            overrides={"TORSH_PLAN__DDP__MAX_BUCKET_SIZE_MB": "50", "TORSH_PLAN__DDP__MIN_BUCKET_SIZE_MB": "25"},
            confidence=confidence,
        )
