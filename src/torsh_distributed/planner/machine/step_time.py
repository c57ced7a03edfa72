"""Predicts the time of a step as named terms, from a model's profile and a machine's rates. Pure arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torsh_distributed.parallel.mesh.layout import MESH_ORDER
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.axis_rules import shards_params
from torsh_distributed.plan.sections.mesh import PipelineConfig
from torsh_distributed.planner.machine.machine_profile import DeviceLink, MachineProfile
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
from torsh_distributed.planner.memory.rank_holdings import ITEMSIZE, samples_per_pass
from torsh_distributed.planner.memory.stage_parts import StagePart, stage_parts
from torsh_distributed.planner.model.model_profile import Held, ModelProfile, SegmentProfile


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one optimizer update, on the slowest rank: an estimate."""

    terms: Mapping[str, float]
    """Seconds by term. Communication counts as far as computation does not hide it."""
    not_measured: tuple[str, ...]

    @property
    def total_s(self) -> float:
        """Of the whole step."""
        return sum(self.terms.values())


def predict_step(profile: ModelProfile, plan: Plan, machine: MachineProfile, optimizer: OptimizerProfile) -> StepTime:
    """The time of a step for a plan that is valid and resolved for its world.

    Products run at the machine's rate for them, all else at its memory's; a step never takes less than its kernels
    take to launch. Gradients and gathered pieces travel while the neighbouring block computes.
    """
    return _Prediction(profile, plan, machine, optimizer).step_time()


@dataclass
class _Prediction:
    profile: ModelProfile
    plan: Plan
    machine: MachineProfile
    optimizer: OptimizerProfile

    def __post_init__(self) -> None:
        self.mesh = self.plan.mesh
        self.samples = samples_per_pass(self.plan) / self.mesh.cp
        self.dtype = self.plan.precision.dtype
        self.flops = (self.machine.flops.get(self.dtype) or self.machine.flops["bf16"]).value
        self.is_sharded = shards_params(self.plan)
        self.itemsize = ITEMSIZE[self.dtype]

    # --- one block -------------------------------------------------------------------------------------------

    def _share(self, segment: SegmentProfile) -> float:
        """How much of a segment's memory traffic a tensor-parallel rank has."""
        if self.mesh.tp == 1 or not segment.saved:
            return 1.0
        sizes = {held: amount.at(self.samples) for held, amount in segment.saved.items() if held is not Held.WEIGHTS}
        split = sizes.get(Held.SPLIT, 0.0)
        hidden = sum(sizes.values()) - split
        hidden = hidden / self.mesh.tp if self.plan.tensor.sequence_parallel else hidden
        return (split / self.mesh.tp + hidden) / max(1.0, sum(sizes.values()))

    def forward_s(self, segment: SegmentProfile) -> float:
        """One forward of a segment, without communication."""
        flops = segment.forward_flops.at(self.samples) / self.mesh.tp / self.flops
        moved = segment.forward_moved.at(self.samples) * self._share(segment) / self.machine.memory_rate.value
        return max(flops + moved, segment.num_forward_kernels * self.machine.launch_s.value)

    def backward_s(self, segment: SegmentProfile) -> float:
        """One backward of a segment, without communication."""
        both = segment.total_flops.at(self.samples) - segment.forward_flops.at(self.samples)
        moved = segment.backward_moved.at(self.samples) * self._share(segment) / self.machine.memory_rate.value
        launched = segment.num_backward_kernels * self.machine.launch_s.value
        return max(both / self.mesh.tp / self.flops + moved, launched)

    def recompute_s(self, segment: SegmentProfile, index: int) -> float:
        """What backward recomputes of a block."""
        config = self.plan.activation
        if config.strategy == "uniform":
            return self.forward_s(segment) if index % config.every_n_layers == 0 else 0.0
        if config.strategy == "by_size":
            size = sum(amount.at(self.samples) for amount in segment.saved.values())
            return self.forward_s(segment) if size >= config.threshold_mb * 2**20 else 0.0
        if config.strategy == "selective":
            return segment.forward_moved.at(self.samples) * self._share(segment) / self.machine.memory_rate.value
        return 0.0

    # --- links -------------------------------------------------------------------------------------------

    def link(self, axis: str) -> DeviceLink:
        """What connects the ranks of an axis: those of inner axes lie between them."""
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
        """The averaging of a segment's gradients over all that see other data."""
        if self.is_sharded:
            size = segment.params.numel(tp=self.mesh.tp, ep=self.mesh.ep, trained_only=True) * self.itemsize
            scatter = self.link("shard").ring_s(size, self.mesh.shard, laps=1)
            return scatter + self.link("dp").ring_s(size / self.mesh.shard, self.mesh.dp, laps=2)
        size = self._trained_bytes(segment)
        return self.link("dp").ring_s(size, self.mesh.data_degree * self.mesh.cp, laps=2)

    # --- the step -------------------------------------------------------------------------------------------

    def segments(self, parts: list[StagePart]) -> list[tuple[int, SegmentProfile]]:
        """What a rank computes for a microbatch, in order; blocks with their place in the model."""
        chain = self.profile.chain()
        found: list[tuple[int, SegmentProfile]] = []
        for part in parts:
            found += [(-1, self.profile.before)] if part.has_before else []
            found += [(index, chain[index]) for index in range(part.first, part.end)]
            found += [(-1, self.profile.after)] if part.has_after else []
        return found

    def rank_terms(self, parts: list[StagePart]) -> dict[str, float]:
        """The terms of one microbatch on a rank, and of the end of a step."""
        forward = backward = recompute = split = hidden_gather = hidden_reduce = 0.0
        # Equal blocks have equal times: each kind is computed once.
        counts: dict[tuple[int, bool], tuple[SegmentProfile, int, int]] = {}
        for index, segment in self.segments(parts):
            key = (id(segment), index >= 0 and self.recompute_s(segment, index) > 0)
            known = counts.get(key, (segment, index, 0))
            counts[key] = (known[0], known[1], known[2] + 1)
        for segment, index, count in counts.values():
            ahead, back = self.forward_s(segment), self.backward_s(segment)
            forward += count * ahead
            backward += count * back
            recompute += count * (self.recompute_s(segment, index) if index >= 0 else 0.0)
            split += count * (self.split_s(segment) if index >= 0 else 0.0)
            gather = self.gather_s(segment)
            hidden_gather += count * (max(0.0, gather - ahead) + max(0.0, gather - back))
            hidden_reduce += count * max(0.0, self.reduce_s(segment) - back)
        return {
            "forward": forward,
            "backward": backward,
            "recompute": recompute,
            "split layers": split,
            "gathering": hidden_gather,
            "averaging": hidden_reduce,
        }

    def step_time(self) -> StepTime:
        """The slowest rank's terms, with accumulated passes, the bubble and the update."""
        plan, ranks = self.plan, stage_parts(self.profile, self.plan)
        passes = plan.training.gradient_accumulation
        microbatches = plan.pipeline.num_microbatches if self.mesh.pp > 1 else 1
        each = [self.rank_terms(parts) for parts in ranks]
        per_microbatch = ("forward", "backward", "recompute", "split layers")
        slowest = max(each, key=lambda terms: sum(terms[name] for name in per_microbatch))
        terms = {name: passes * microbatches * slowest[name] for name in per_microbatch}
        if self.mesh.pp > 1:
            work = sum(slowest[name] for name in per_microbatch)
            terms["bubble"] = passes * work * _bubble(plan.pipeline, self.mesh.pp)
            size = max((block.output_bytes.at(self.samples) for block in self.profile.blocks), default=0.0)
            terms["stages sending"] = passes * 2 * (microbatches + self.mesh.pp) * self.link("pp").send_s(size)
        terms["gathering"] = passes * microbatches * slowest["gathering"]
        terms["averaging"] = slowest["averaging"]
        terms["update"] = self._update_s(ranks)
        return StepTime(
            {name: seconds for name, seconds in terms.items() if seconds > 0},
            tuple(self.machine.not_measured(self.dtype)),
        )

    def _update_s(self, ranks: list[list[StagePart]]) -> float:
        """Reading and writing parameters, gradients and state."""
        over = self.mesh.shard if self.mesh.shard > 1 else 1
        sizes = [sum(self._trained_bytes(one) for _, one in self.segments(parts)) for parts in ranks]
        return max(sizes) / over * (3 + 2 * self.optimizer.state_ratio) / self.machine.memory_rate.value


@functools.lru_cache(maxsize=512)
def _bubble(config: PipelineConfig, pp: int) -> float:
    """The idle time of a schedule, in units of one microbatch's work on a rank."""
    from torsh_distributed.parallel.pipeline.schedule import compute_timeline

    timeline = compute_timeline(config, pp)
    # A forward costs 1 and a backward 2 for each stage of a rank.
    work = 3.0 * config.stages_per_rank
    return timeline.span / work - config.num_microbatches
