"""Predicts the time of a step as named terms, from a model's profile and a machine's rates. Pure arithmetic."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torsh_distributed.parallel.mesh.layout import MESH_ORDER
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.axis_rules import shards_params
from torsh_distributed.plan.sections.mesh import PipelineConfig
from torsh_distributed.planner.machine.codec_rates import codec_rate, travel_s
from torsh_distributed.planner.machine.machine_profile import DeviceLink, MachineProfile
from torsh_distributed.planner.machine.operation_times import OperationTimes, RankShare
from torsh_distributed.planner.machine.past_runs import PART_OF, parts_of
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
from torsh_distributed.planner.memory.rank_holdings import (
    ITEMSIZE,
    Recompute,
    fuses_loss,
    recomputed_blocks,
    samples_per_pass,
)
from torsh_distributed.planner.memory.stage_parts import StagePart, largest_ranks, stage_parts
from torsh_distributed.planner.model.model_profile import Held, ModelProfile, SegmentProfile

PER_MICROBATCH = ("forward", "backward", "recompute", "split layers")
"""The terms that every microbatch has."""

SegmentCount = tuple[SegmentProfile, int, Recompute]
"""A segment, how many of it, and what is recomputed of each."""
Counted = dict[tuple[tuple[StagePart, ...], tuple[Recompute, ...], bool], tuple[SegmentCount, ...]]
"""What ranks compute, by their stages, what is recomputed of each block, and whether the loss is fused."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one optimizer update, on the slowest rank: an estimate."""

    terms: Mapping[str, float]
    """Seconds by term. Communication counts as far as computation does not hide it."""
    not_measured: tuple[str, ...]
    corrections: Mapping[str, float] = field(default_factory=dict)
    """By part of a step, what past runs have multiplied its terms with; empty before there are any."""
    num_runs: int = 0
    """Past runs that the corrections are from."""
    interval: tuple[float, float] | None = None
    """Between which multiples of the total 90 % of runs are; None before there are enough."""

    @property
    def total_s(self) -> float:
        """Of the whole step."""
        return sum(self.terms.values())

    def uncorrected(self) -> dict[str, float]:
        """The seconds by part that follow from rates alone."""
        found = parts_of(self.terms)
        return {part: seconds / self.corrections.get(part, 1.0) for part, seconds in found.items()}

    def learned(self) -> str:
        """What past runs have changed, and how far off they were, in a sentence; empty before there are any."""
        if not self.num_runs:
            return ""
        by = ", ".join(f"{part} × {factor:.2f}" for part, factor in self.corrections.items())
        runs = f"{self.num_runs} recorded run{'s' if self.num_runs > 1 else ''}"
        if self.interval is None:
            return f"corrected by {runs}: {by}; an interval needs three"
        low, high = self.interval
        return f"corrected by {runs}: {by}; 90 % of runs take {low:.2f} to {high:.2f} times what is said"


@dataclass(frozen=True)
class StagePhases:
    """What one pipeline rank does for a microbatch, in seconds."""

    forward_s: float
    forward_waits_s: float
    """Communication that its computation does not hide."""
    backward_s: float
    """With what is recomputed."""
    backward_waits_s: float
    num_blocks: int


@dataclass(frozen=True)
class StepPhases:
    """A step as phases: what ranks compute by themselves, and where they wait for which others."""

    stages: tuple[StagePhases, ...]
    """By pipeline rank."""
    block_axes: tuple[str, ...]
    """Along which ranks meet in every block."""
    send_s: float
    """From one stage to the next."""
    averaging_axes: tuple[str, ...]
    averaging_s: float
    update_s: float


class StepPredictor:
    """Predicts steps of one model on one machine; what plans have in common is computed once."""

    def __init__(self, profile: ModelProfile, machine: MachineProfile, optimizer: OptimizerProfile) -> None:
        self.profile, self._machine, self._optimizer = profile, machine, optimizer
        self._times: dict[str, OperationTimes] = {}
        self._counted: Counted = {}
        self._learned: dict[int, tuple[Mapping[str, float], tuple[float, float] | None]] = {}

    def step_time(self, plan: Plan) -> StepTime:
        """The time of a step for a plan that is valid and resolved for its world.

        Operations take what the machine's rates say; gradients and gathered pieces travel while the neighbouring block
        computes, as far as the machine was seen to do both at once.
        """
        return self._prediction(plan).step_time()

    def phases(self, plan: Plan) -> StepPhases:
        """The same step as phases of ranks, for a simulation."""
        return self._prediction(plan).phases()

    def recompute_s(self, plan: Plan, kind: int, recompute: Recompute) -> float:
        """The time to recompute so much of one microbatch in a block of a kind."""
        return self._prediction(plan).recompute_s(self.profile.blocks[kind], recompute)

    def _prediction(self, plan: Plan) -> _Prediction:
        dtype = plan.precision.dtype
        times = self._times.setdefault(dtype, OperationTimes(self._machine, dtype))
        num_ranks = math.prod(plan.mesh.degrees.values())
        if num_ranks not in self._learned:
            past = self._machine.past
            self._learned[num_ranks] = past.factors(num_ranks), past.interval(num_ranks)
        factors, interval = self._learned[num_ranks]
        return _Prediction(self.profile, plan, self._machine, self._optimizer, times, self._counted, factors, interval)


@dataclass
class _Prediction:
    profile: ModelProfile
    plan: Plan
    machine: MachineProfile
    optimizer: OptimizerProfile
    times: OperationTimes
    counted: Counted
    factors: Mapping[str, float]
    """What past runs multiply a part of a step with."""
    interval: tuple[float, float] | None

    def __post_init__(self) -> None:
        self.mesh = self.plan.mesh
        self.is_fused = fuses_loss(self.profile, self.plan, self.machine.device_type)
        if self.is_fused:
            self.profile = self.profile.with_fused_loss
        self.samples = samples_per_pass(self.plan) / self.mesh.cp
        self.is_sharded = shards_params(self.plan)
        self.itemsize = ITEMSIZE[self.plan.precision.dtype]
        self.num_replicas = self.mesh.dp if self.is_sharded else self.mesh.data_degree * self.mesh.cp
        self._links: dict[str, DeviceLink] = {}
        self._shares: dict[int, RankShare] = {}
        self.recomputed = recomputed_blocks(self.profile, self.plan)
        codecs = self.machine.codecs
        self.codec = codec_rate(self.plan.compress, codecs, self.num_replicas, self.link("dp")) if codecs else None

    # --- one block -------------------------------------------------------------------------------------------

    def _share(self, segment: SegmentProfile) -> RankShare:
        """How much of a segment a rank computes."""
        if id(segment) not in self._shares:
            self._shares[id(segment)] = self._computed_share(segment)
        return self._shares[id(segment)]

    def _computed_share(self, segment: SegmentProfile) -> RankShare:
        tp = self.mesh.tp
        if tp == 1 or not segment.saved:
            return RankShare(self.samples, tp, 1.0)
        sizes = {held: amount.at(self.samples) for held, amount in segment.saved.items() if held is not Held.WEIGHTS}
        split = sizes.get(Held.SPLIT, 0.0)
        hidden = sum(sizes.values()) - split
        hidden = hidden / tp if self.plan.tensor.sequence_parallel else hidden
        return RankShare(self.samples, tp, (split / tp + hidden) / max(1.0, sum(sizes.values())))

    def forward_s(self, segment: SegmentProfile) -> float:
        """One forward of a segment, without communication."""
        return self.times.forward_s(segment, self._share(segment))

    def backward_s(self, segment: SegmentProfile) -> float:
        """One backward of a segment, without communication."""
        return self.times.backward_s(segment, self._share(segment))

    def recompute_s(self, segment: SegmentProfile, recompute: Recompute) -> float:
        """The time to recompute so much of a block."""
        if recompute is Recompute.WHOLE:
            return self.forward_s(segment)
        return self.times.cheap_s(segment, self._share(segment)) if recompute is Recompute.CHEAP else 0.0

    # --- links -------------------------------------------------------------------------------------------

    def link(self, axis: str) -> DeviceLink:
        """What connects the ranks of an axis: those of inner axes lie between them."""
        if axis not in self._links:
            self._links[axis] = self._link(axis)
        return self._links[axis]

    def _link(self, axis: str) -> DeviceLink:
        apart = 1
        for one in reversed(MESH_ORDER):
            apart *= getattr(self.mesh, one)
            if one == axis:
                break
        return self.machine.link(apart)

    def split_s(self, segment: SegmentProfile) -> float:
        """Sums over tensor-parallel ranks in forward and backward of a block, and exchanges along cp and ep."""
        size = segment.input_bytes.at(self.samples)
        seconds = 4 * self.link("tp").ring_s(size, self.mesh.tp, laps=2)
        seconds += 4 * self.link("cp").ring_s(size, self.mesh.cp, laps=1)
        if any(kind.is_expert for kind in segment.params.numel_of):
            seconds += 4 * self.link("ep").ring_s(size, self.mesh.ep, laps=1)
        return seconds

    def gather_s(self, segment: SegmentProfile) -> float:
        """The gathering of a sharded piece."""
        size = segment.params.numel(tp=self.mesh.tp, ep=self.mesh.ep) * self.itemsize
        return self.link("shard").ring_s(size, self.mesh.shard, laps=1) if self.is_sharded else 0.0

    def _trained_bytes(self, segment: SegmentProfile) -> float:
        return segment.params.num_bytes(tp=self.mesh.tp, ep=self.mesh.ep, trained_only=True)

    def reduce_s(self, segment: SegmentProfile) -> float:
        """The averaging of a segment's gradients over all that see other data: what travels."""
        scatter, size = 0.0, self._replicated_bytes(segment)
        if self.is_sharded:
            scatter = self.link("shard").ring_s(size * self.mesh.shard, self.mesh.shard, laps=1)
        plain, count = self.link("dp").ring_s(size, self.num_replicas, laps=2), self.num_replicas
        if self.codec is None or count == 1:
            return scatter + plain
        packed = travel_s(self.codec, size, count, self.link("dp"))
        return scatter + plain + (packed - plain) / self.plan.compress.period

    def compress_s(self, segment: SegmentProfile) -> float:
        """What this rank computes to compress a segment's gradients."""
        if self.codec is None or self.num_replicas == 1:
            return 0.0
        return self.codec.busy_s(self._replicated_bytes(segment), self.num_replicas) / self.plan.compress.period

    def _replicated_bytes(self, segment: SegmentProfile) -> float:
        """Gradients of a segment that replicas average."""
        if not self.is_sharded:
            return self._trained_bytes(segment)
        numel = segment.params.numel(tp=self.mesh.tp, ep=self.mesh.ep, trained_only=True)
        return numel * self.itemsize / self.mesh.shard

    def _not_measured(self, num_ranks: int) -> tuple[str, ...]:
        named = self.machine.not_measured(self.plan.precision.dtype, num_ranks=num_ranks)
        compress = self.plan.compress
        is_counted = self.codec is not None or (compress.name == "auto" and self.machine.codecs)
        if compress.name != "none" and self.num_replicas > 1 and not is_counted:
            named.append(f"compress.method {compress.method}, counted as without: torsh bench machine measures it")
        elif compress.name != "none" and self.is_sharded and self.mesh.dp == 1:
            named.append("compression on the way into shards, counted as without")
        return tuple(named)

    # --- the step -------------------------------------------------------------------------------------------

    def counts(self, parts: tuple[StagePart, ...]) -> tuple[SegmentCount, ...]:
        """What a rank computes for a microbatch: each kind of segment, how many, and what is recomputed of it."""
        key = parts, self.recomputed, self.is_fused
        known = self.counted.get(key)
        if known is not None:
            return known
        found: Counter[tuple[int, Recompute]] = Counter()
        for part in parts:
            found.update(
                zip(self.profile.order[part.first : part.end], self.recomputed[part.first : part.end], strict=True)
            )
        blocks = [(self.profile.blocks[kind], count, again) for (kind, again), count in found.items()]
        before = sum(part.has_before for part in parts)
        after = sum(part.has_after for part in parts)
        nothing = Recompute.NOTHING
        around = [(self.profile.before, before, nothing), (self.profile.after, after, nothing)]
        counts = self.counted[key] = (*blocks, *(one for one in around if one[1]))
        return counts

    def rank_terms(self, parts: tuple[StagePart, ...]) -> dict[str, float]:
        """The terms of one microbatch on a rank, and of the end of a step."""
        terms = dict.fromkeys((*PER_MICROBATCH, "gathering", "gathering in backward", "averaging", "compressing"), 0.0)
        # Equal blocks have equal times: each kind is computed once.
        for segment, count, again in self.counts(parts):
            is_block = segment is not self.profile.before and segment is not self.profile.after
            ahead, back = self.forward_s(segment), self.backward_s(segment)
            gather = self.gather_s(segment)
            terms["forward"] += count * ahead
            terms["backward"] += count * back
            terms["gathering"] += count * self._not_hidden(gather, ahead)
            if self.plan.fsdp.strategy != "shard_grad_op":  # which keeps what forward has gathered
                terms["gathering in backward"] += count * self._not_hidden(gather, back)
            terms["averaging"] += count * self._not_hidden(self.reduce_s(segment), back)
            terms["compressing"] += count * self.compress_s(segment)
            if is_block:
                terms["recompute"] += count * self.recompute_s(segment, again)
                terms["split layers"] += count * self.split_s(segment)
        return terms

    def _not_hidden(self, communication_s: float, compute_s: float) -> float:
        """What is left of a communication that runs beside a computation."""
        return communication_s - self.machine.overlap.value * min(communication_s, compute_s)

    def step_time(self) -> StepTime:
        """The slowest rank's terms, with accumulated passes, the bubble and the update."""
        plan, ranks = self.plan, self._ranks()
        passes = plan.training.gradient_accumulation
        microbatches = plan.pipeline.num_microbatches if self.mesh.pp > 1 else 1
        each = [self.rank_terms(parts) for parts in ranks]
        slowest = max(each, key=lambda terms: sum(terms[name] for name in PER_MICROBATCH))
        terms = {name: passes * microbatches * slowest[name] for name in PER_MICROBATCH}
        if self.mesh.pp > 1:
            work = sum(slowest[name] for name in PER_MICROBATCH)
            terms["bubble"] = passes * work * bubble_of(plan.pipeline, self.mesh.pp)
            terms["stages sending"] = passes * 2 * (microbatches + self.mesh.pp) * self._send_s()
        gathering = slowest["gathering"] + slowest["gathering in backward"]
        terms["gathering"] = passes * microbatches * gathering
        terms["averaging"] = slowest["averaging"]
        terms["compressing"] = slowest["compressing"]
        terms["update"] = self._update_s(ranks)
        past, num_ranks = self.machine.past, math.prod(self.mesh.degrees.values())
        return StepTime(
            {name: seconds * self._factor(PART_OF[name]) for name, seconds in terms.items() if seconds > 0},
            self._not_measured(num_ranks),
            self.factors,
            len(past.like(num_ranks)),
            self.interval,
        )

    def _factor(self, part: str) -> float:
        return self.factors.get(part, 1.0)

    def phases(self) -> StepPhases:
        """The step as phases."""
        every = stage_parts(self.profile, self.plan)
        terms = [self.rank_terms(parts) for parts in every]
        axes = ("tp", "cp", "ep", *(("shard",) if self.is_sharded else ()))
        averaging = ("dp", "shard", "ep", "cp")
        compute, wait = self._factor("compute"), self._factor("wait")
        return StepPhases(
            stages=tuple(
                StagePhases(
                    forward_s=compute * one["forward"],
                    forward_waits_s=wait * (one["split layers"] / 2 + one["gathering"]),
                    backward_s=compute * (one["backward"] + one["recompute"]),
                    backward_waits_s=wait * (one["split layers"] / 2 + one["gathering in backward"]),
                    num_blocks=sum(part.end - part.first for part in parts),
                )
                for one, parts in zip(terms, every, strict=True)
            ),
            block_axes=tuple(axis for axis in axes if getattr(self.mesh, axis) > 1),
            send_s=wait * self._send_s() if self.mesh.pp > 1 else 0.0,
            averaging_axes=tuple(axis for axis in averaging if getattr(self.mesh, axis) > 1),
            averaging_s=wait * max(one["averaging"] + one["compressing"] for one in terms),
            update_s=self._factor("optimizer") * self._update_s(self._ranks()),
        )

    def _send_s(self) -> float:
        size = max((block.output_bytes.at(self.samples) for block in self.profile.blocks), default=0.0)
        return self.link("pp").send_s(size)

    def _ranks(self) -> list[tuple[StagePart, ...]]:
        """The stages of those pipeline ranks that differ: ranks with equal stages take equal times."""
        every = stage_parts(self.profile, self.plan)
        return [every[one] for one in largest_ranks(every, self.profile.order, self.recomputed)]

    def _update_s(self, ranks: Iterable[tuple[StagePart, ...]]) -> float:
        """The update of what one rank holds."""
        over = self.mesh.shard if self.mesh.shard > 1 else 1
        return max(self._update_of(self.counts(parts), over) for parts in ranks)

    def _update_of(self, counts: Iterable[SegmentCount], over: int) -> float:
        held = list(counts)
        num_bytes = sum(count * self._trained_bytes(one) for one, count, _ in held) / over
        rates = self.machine.rates
        if rates is None:  # reading and writing parameters, gradients and state
            return num_bytes * (3 + 2 * self.optimizer.state_ratio) / self.machine.memory_rate.value
        tensors = max(1, sum(count * one.params.num_tensors for one, count, _ in held))
        return tensors * rates.update.seconds_at(num_bytes / tensors)


@functools.lru_cache(maxsize=512)
def bubble_of(config: PipelineConfig, pp: int) -> float:
    """The idle time of a schedule, in units of one microbatch's work on a rank."""
    if config.schedule in ("gpipe", "one_f_one_b", "interleaved_one_f_one_b") and config.num_microbatches % pp == 0:
        # Each rank waits for one microbatch to pass one stage of every other rank, there and back.
        return (pp - 1) / config.stages_per_rank
    from torsh_distributed.parallel.pipeline.schedule import compute_timeline

    timeline = compute_timeline(config, pp)
    # A forward costs 1 and a backward 2 for each stage of a rank.
    work = 3.0 * config.stages_per_rank
    return timeline.span / work - config.num_microbatches
