"""What a rank holds: parameters, state, activations and gathered pieces, from a model's profile. Pure arithmetic."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from torsh_distributed import upward
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.axis_rules import shards_params
from torsh_distributed.plan.compatibility.speed_rules import can_fuse_loss
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
from torsh_distributed.planner.memory.stage_parts import StagePart
from torsh_distributed.planner.model.model_profile import (
    Held,
    HeldBytes,
    ModelProfile,
    ParamCounts,
    SegmentProfile,
)

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}

Terms = dict[str, float]


def samples_per_pass(plan: Plan) -> int:
    """Samples of one forward on a rank, or of one microbatch of a pipeline; the plan has no degree -1."""
    training = plan.training
    per_pass = math.ceil(training.batch_size / plan.mesh.data_degree / training.gradient_accumulation)
    return math.ceil(per_pass / plan.pipeline.num_microbatches) if plan.mesh.pp > 1 else per_pass


def fuses_loss(profile: ModelProfile, plan: Plan, device_type: str) -> bool:
    """Whether training computes the loss without whole logits, as `should_defer` of the engine decides."""
    fused, wanted = profile.fused_loss, plan.training.fused_loss
    if fused is None or wanted is False:
        return False
    is_left_to_shards = not (fused.is_apart and plan.mesh.shard > 1)
    return wanted is True or (
        device_type == "cuda" and fused.is_automatic and is_left_to_shards and can_fuse_loss(plan)
    )


def held_bytes(amounts: HeldBytes, plan: Plan, samples: float) -> float:
    """The bytes that a tensor-parallel rank holds of some amounts of a microbatch, without copies of weights."""
    tp = plan.mesh.tp
    share = {Held.SPLIT: tp, Held.HIDDEN: tp if plan.tensor.sequence_parallel else 1, Held.GATHERED: 1}
    return sum(amount.at(samples) / share[kind] for kind, amount in amounts.items() if kind in share)


class Recompute(IntEnum):
    """What backward recomputes of a block."""

    NOTHING = 0
    CHEAP = 1
    """All but products and attention, as `selective`."""
    WHOLE = 2


def recomputed_blocks(profile: ModelProfile, plan: Plan) -> tuple[Recompute, ...]:
    """For each block of the model, what backward recomputes of it; the plan is decided (`ActivationConfig`)."""
    return with_own(profile, _planned(profile, plan))


def with_own(profile: ModelProfile, recomputed: tuple[Recompute, ...]) -> tuple[Recompute, ...]:
    """The same with the blocks that the model recomputes whatever the plan says."""
    if not any(block.recomputes_itself for block in profile.blocks):
        return recomputed
    chain = zip(profile.chain(), recomputed, strict=True)
    return tuple(Recompute.WHOLE if block.recomputes_itself else one for block, one in chain)


def _planned(profile: ModelProfile, plan: Plan) -> tuple[Recompute, ...]:
    config, count = plan.activation, profile.num_blocks
    if config.strategy == "uniform":
        return _every(config.every_n_layers, count)
    if config.strategy == "by_size":
        limit, samples = config.threshold_mb * 2**20, samples_per_pass(plan) / plan.mesh.cp
        large = (held_bytes(block.saved, plan, samples) >= limit for block in profile.chain())
        return tuple(Recompute.WHOLE if one else Recompute.NOTHING for one in large)
    if config.strategy == "budget":
        named = dict.fromkeys(config.whole_layers, Recompute.WHOLE)
        named |= dict.fromkeys(config.selective_layers, Recompute.CHEAP)
        return tuple(named.get(name, Recompute.NOTHING) for name in profile.block_names)
    return (Recompute.CHEAP if config.strategy == "selective" else Recompute.NOTHING,) * count


@functools.lru_cache(maxsize=64)
def _every(step: int, count: int) -> tuple[Recompute, ...]:
    return tuple(Recompute.NOTHING if index % step else Recompute.WHOLE for index in range(count))


@dataclass
class RankHoldings:
    """What one pipeline rank holds of a model, in the parts that moments of a step are made of."""

    profile: ModelProfile
    plan: Plan
    optimizer: OptimizerProfile
    device_type: str
    parts: tuple[StagePart, ...]
    recomputed: tuple[Recompute, ...]
    """What is recomputed of each block of the model."""

    def __post_init__(self) -> None:
        plan = self.plan
        self.fused_loss = self.profile.fused_loss if fuses_loss(self.profile, plan, self.device_type) else None
        if self.fused_loss is not None:
            self.profile = self.profile.with_fused_loss
        self.tp, self.ep = plan.mesh.tp, plan.mesh.ep
        self.samples = samples_per_pass(plan) / plan.mesh.cp
        self.is_sharded = shards_params(plan)
        self.shard = plan.mesh.shard
        self.compute_size = ITEMSIZE[plan.precision.dtype]
        kinds = self.profile.all_params.numel_of
        self.param_size = max((kind.itemsize for kind in kinds), default=4)
        self.gather_size = self.compute_size if plan.precision.dtype != "fp32" else self.param_size
        self.reduce_size = ITEMSIZE.get(plan.precision.reduce_dtype, self.gather_size)
        self.chain = self.profile.chain()
        self._kept: dict[tuple[int, Recompute], float] = {}
        self._running: dict[str, list[float]] = {}
        has_buckets = not self.is_sharded and plan.mesh.pp == 1 and plan.mesh.data_degree * plan.mesh.cp > 1
        has_many = plan.training.gradient_accumulation > 1 or plan.mesh.pp > 1
        self.num_grads = (int(has_buckets) + int(has_many)) if not self.is_sharded else 0
        """Copies of the gradients that are there all the time: buckets, and what passes accumulate beside them."""
        self.keeps_grads = self.num_grads > 0
        self.accumulates_whole = self.is_sharded and has_many

    # --- what a rank keeps all the time --------------------------------------------------------------------------

    def params(self) -> ParamCounts:
        """The parameters of this rank's stages, without a tied head whose embedding is elsewhere."""
        return self.profile.params_of(
            tuple((part.first, part.end, part.has_before, part.has_after) for part in self.parts)
        )

    def summed(self, what: str, first: int, end: int, size_of: Callable[[int], float]) -> float:
        """The sum of `size_of` over the blocks from `first` to before `end`; `what` names it, so sums are kept."""
        sums = self._running.get(what)
        if sums is None:
            sums = self._running[what] = [0.0, *itertools.accumulate(map(size_of, range(len(self.chain))))]
        return sums[end] - sums[first]

    def _tied_bytes(self) -> float:
        """A head tied to an embedding on another pipeline rank is a second copy."""
        has_after = any(part.has_after for part in self.parts)
        has_before = any(part.has_before for part in self.parts)
        return float(self.profile.tied_numel * self.param_size) if has_after and not has_before else 0.0

    def lasting(self) -> Terms:
        """Parameters, state and what else is there in every moment."""
        plan, params = self.plan, self.params()
        whole = params.num_bytes(tp=self.tp, ep=self.ep) + self._tied_bytes()
        trained = params.num_bytes(tp=self.tp, ep=self.ep, trained_only=True) + self._tied_bytes()
        over = self.shard if self.is_sharded else 1
        state_over = self.shard if self.shard > 1 else 1
        terms: Terms = {
            "parameters": whole / over,
            "optimizer state": self.optimizer.state_ratio * trained / state_over,
            "buffers": float(self.profile.buffer_bytes),
        }
        if self.keeps_grads:
            is_twice = self.num_grads == 1 and not plan.ddp.gradient_as_bucket_view and plan.mesh.data_degree > 1
            terms["gradients"] = (2 if is_twice else self.num_grads) * trained
        if plan.mesh.pp > 1:
            terms["stage buffers"] = plan.pipeline.num_microbatches * sum(map(self._edges, self.parts))
        return self._offloaded(terms)

    def _offloaded(self, terms: Terms) -> Terms:
        """What offload moves to the host, and the budget in which it comes back."""
        offload = self.plan.offload
        if not offload.enabled:
            return terms
        moved = {"parameters": offload.params, "gradients": offload.grads, "optimizer state": offload.optimizer_state}
        away = sum(terms.get(name, 0.0) for name, is_moved in moved.items() if is_moved)
        left = {name: size for name, size in terms.items() if not moved.get(name, False)}
        return {**left, "offload window": min(away, offload.gpu_memory_budget_gb * 2**30)}

    def _edges(self, part: StagePart) -> float:
        """What a stage receives for a microbatch: its input, and the gradient of its output."""
        into = 0.0 if part.has_before else self.chain[part.first].input_bytes.at(self.samples)
        back = 0.0 if part.has_after else self.chain[part.end - 1].output_bytes.at(self.samples)
        return (into + back) / self._sequence_split()

    # --- activations -----------------------------------------------------------------------------------------------

    def _sequence_split(self) -> int:
        return self.tp if self.plan.tensor.sequence_parallel else 1

    def held(self, amounts: HeldBytes) -> float:
        """The bytes of a microbatch that this rank holds of some amounts, without copies of weights."""
        return held_bytes(amounts, self.plan, self.samples)

    def weights(self, amounts: HeldBytes, params: ParamCounts) -> float:
        """Copies of parameters that autocast makes; gathered parameters have the format already."""
        amount = amounts.get(Held.WEIGHTS)
        if amount is None or self.is_sharded:
            return 0.0
        whole = params.num_bytes()
        return amount.at(self.samples) * (params.num_bytes(tp=self.tp, ep=self.ep) / whole if whole else 1.0)

    def _input(self, block: SegmentProfile) -> float:
        return block.input_bytes.at(self.samples) / self._sequence_split()

    def kept(self, index: int) -> float:
        """What block `index` keeps of one microbatch until its backward."""
        key = (self.profile.order[index], self.recomputed[index])
        if key not in self._kept:
            self._kept[key] = self._kept_by_block(index)
        return self._kept[key]

    def _kept_by_block(self, index: int) -> float:
        block = self.chain[index]
        activation = self.plan.activation
        if activation.disk_dir is not None or (activation.offload_to_cpu and self.device_type != "cpu"):
            return 0.0
        if self.recomputed[index] is Recompute.WHOLE:
            return self._input(block)
        if self.recomputed[index] is Recompute.CHEAP:
            return self.held(block.selective_saved)
        return self.held(block.saved)

    def kept_by(self, part: StagePart) -> float:
        """What a stage keeps of one microbatch."""
        around = self.held(self.profile.before.saved) if part.has_before else 0.0
        around += self.held(self.profile.after.saved) if part.has_after else 0.0
        blocks = self.summed("kept", part.first, part.end, self.kept)
        return around + self.held(self.profile.shared_saved) + blocks

    def copies(self, part: StagePart) -> float:
        """Copies of weights that a stage keeps from forward to backward."""
        around = [self.profile.before] * part.has_before + [self.profile.after] * part.has_after
        copies = sum(self.weights(segment.saved, segment.params) for segment in around)
        return copies + self.summed("copies", part.first, part.end, self.block_copies)

    def block_copies(self, index: int, *, is_computing: bool = False) -> float:
        """Copies of the weights of block `index` that are kept until its backward, or there while it computes."""
        if self.recomputed[index] is Recompute.WHOLE and not is_computing:
            return 0.0
        return self.weights(self.chain[index].saved, self.chain[index].params)

    def loss_workspace(self) -> float:
        """What a fused loss takes while it computes: logits of some tokens, and a copy of the head's weight."""
        fused = self.fused_loss
        if fused is None:
            return 0.0
        workspace = upward.load(upward.LOSS_WORKSPACE)
        size: int = workspace(
            math.ceil(fused.tokens.at(self.samples)),
            fused.num_classes,
            fused.width,
            itemsize=fused.itemsize,
            device_type=self.device_type,
        )
        head = fused.num_classes * fused.width * fused.itemsize
        return size + (head if fused.copies_head and not self.is_sharded else 0)

    def head_grad_buffer(self) -> float:
        """What a fused loss sums the gradient of the head in, from the loss until its backward."""
        return float(self.fused_loss.head_grad_bytes) if self.fused_loss is not None else 0.0

    def head_grad_copy(self) -> float:
        """The same buffer in backward, where it is not the gradient itself: that is another, or is added to one."""
        is_gradient = not (self.is_sharded or self.keeps_grads) and self.param_size == 4
        return 0.0 if is_gradient else self.head_grad_buffer()

    # --- pieces that are gathered ------------------------------------------------------------------------------------

    def piece(self, segment: SegmentProfile) -> float:
        """A piece of sharded parameters while it is whole."""
        return segment.params.numel(tp=self.tp, ep=self.ep) * self.gather_size

    def piece_grads(self, segment: SegmentProfile) -> float:
        """The gradients of a piece before they are sharded."""
        return segment.params.numel(tp=self.tp, ep=self.ep, trained_only=True) * self.gather_size

    def shard_grads(self, segment: SegmentProfile) -> float:
        """The gradients that this rank keeps of a segment."""
        trained = segment.params.num_bytes(tp=self.tp, ep=self.ep, trained_only=True)
        return trained / self.shard if self.is_sharded else trained

    def outer(self, part: StagePart) -> list[SegmentProfile]:
        """The segments around the blocks that a stage has; together they are one piece, gathered all the time."""
        return [self.profile.before] * part.has_before + [self.profile.after] * part.has_after

    def gathered(self, part: StagePart, index: int | None, *, is_backward: bool, is_done: bool = False) -> float:
        """What is gathered while block `index` computes, or has just computed; or while head and loss do (None)."""
        if not self.is_sharded:
            return 0.0
        fsdp = self.plan.fsdp
        root = sum(map(self.piece, self.outer(part)))
        if fsdp.strategy == "shard_grad_op":
            end = part.end if index is None or not is_backward else index + (not is_done)
            return root + self.summed("pieces", part.first, end, lambda one: self.piece(self.chain[one]))
        if index is None:
            return root
        prefetches = fsdp.backward_prefetch == "backward_pre" if is_backward else fsdp.forward_prefetch
        ahead = fsdp.max_gathered_ahead if prefetches else 0
        behind = range(max(part.first, index - ahead), index)
        if not is_backward:
            behind = range(index + 1, min(part.end, index + 1 + ahead))
        prefetched = sum(self.piece(self.chain[one]) for one in behind)
        own = 0.0 if is_done else self.piece(self.chain[index])
        # A piece arrives in one flat buffer and is copied out of it before the next one is asked for.
        return root + own + max(prefetched, own)

    def whole_grads(self, part: StagePart, index: int | None) -> float:
        """Gradients of gathered pieces when block `index` has computed its own, or the loss (None) its part of them."""
        if not self.is_sharded:
            return 0.0
        own = 0.0 if index is None else self.piece_grads(self.chain[index])
        if self.accumulates_whole:
            kept = self.profile.num_blocks if index is None else index + 1
            last = max(part.first, min(kept, part.end))
            blocks = self.summed("grads", part.first, last, lambda one: self.piece_grads(self.chain[one]))
            return blocks + own + sum(map(self.piece_grads, self.outer(part)))
        # Those of the head are there from the loss on: what is around the blocks is one piece.
        return own + sum(map(self.piece_grads, self.outer(part)[-1:] if part.has_after else []))
