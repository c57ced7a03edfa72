"""The memory that each rank of a plan needs: named terms, computed from a model's profile. Pure arithmetic.

A step is looked at where its peak can be: in the forward and backward of each kind of block, of head and loss, and in
the update. Blocks repeat and memory grows evenly between them, so the first and the last of each kind are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torsh_distributed.plan import Plan
from torsh_distributed.planner.memory.memory_table import MemoryTable, RankMemory
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
from torsh_distributed.planner.memory.rank_holdings import (
    RankHoldings,
    Recompute,
    Terms,
    recomputed_blocks,
    samples_per_pass,
    with_own,
)
from torsh_distributed.planner.memory.stage_parts import StagePart, largest_ranks, microbatches_in_flight, stage_parts
from torsh_distributed.planner.model.model_profile import (
    ModelProfile,
)

_ROWS_BYTES = 25 * 2**20
"""A message of `parallel/sharded/zero1.py`."""


def estimate_memory(
    profile: ModelProfile, plan: Plan, optimizer: OptimizerProfile, *, device_type: str = "cuda"
) -> MemoryTable:
    """The estimated peak of every pipeline rank, for a plan that is valid and resolved for its world.

    Of what torch's allocator gives out: the context of the device, communicators and what the allocator keeps in
    reserve come on top.
    """
    parts = stage_parts(profile, plan)
    return _table(profile, plan, optimizer, device_type, parts, range(len(parts)))


def rank_peak(
    profile: ModelProfile,
    plan: Plan,
    optimizer: OptimizerProfile,
    *,
    rank: int,
    recomputed: tuple[Recompute, ...],
    device_type: str = "cuda",
) -> float:
    """The estimated peak of one pipeline rank, if so much is recomputed, whatever the plan says of that."""
    recomputed = with_own(profile, recomputed)
    parts = stage_parts(profile, plan)[rank]
    return _RankEstimate(profile, plan, optimizer, device_type, parts, recomputed).rank_memory(rank).total_bytes


def estimate_peak(
    profile: ModelProfile, plan: Plan, optimizer: OptimizerProfile, *, device_type: str = "cuda"
) -> MemoryTable:
    """The same for the ranks alone one of which needs the most: quicker, for a search over many plans."""
    parts = stage_parts(profile, plan)
    chosen = largest_ranks(parts, profile.order, recomputed_blocks(profile, plan))
    return _table(profile, plan, optimizer, device_type, parts, chosen)


def _table(
    profile: ModelProfile,
    plan: Plan,
    optimizer: OptimizerProfile,
    device_type: str,
    parts: Sequence[tuple[StagePart, ...]],
    ranks: Iterable[int],
) -> MemoryTable:
    recomputed = recomputed_blocks(profile, plan)
    found = (
        _RankEstimate(profile, plan, optimizer, device_type, parts[rank], recomputed).rank_memory(rank)
        for rank in ranks
    )
    return MemoryTable(tuple(found), samples_per_pass(plan))


class _RankEstimate(RankHoldings):
    """The moments of one pipeline rank's step."""

    def moments(self) -> Iterator[tuple[str, Terms]]:
        """The moments at which the peak may be, with the terms that differ between them."""
        for part in self.parts:
            yield from self._forward_moments(part)
            yield from self._backward_moments(part)
        yield "the update", self._update()
        if self.shard > 1 and not self.is_sharded:
            yield "the gathering of updated rows", {"gathered parameters": self._gathered_rows()}

    def _marks(self, part: StagePart) -> list[int]:
        """The first and the last block of each kind in a stage."""
        found: dict[tuple[int, Recompute | None], list[int]] = {}
        ahead = part.first + self.plan.fsdp.max_gathered_ahead
        if self.is_sharded and ahead < part.end:
            found[-1, None] = [ahead, ahead]  # where backward still prefetches
        for index in range(part.first, part.end):
            key = (self.profile.order[index], self.recomputed[index])
            place = found.setdefault(key, [index, index])
            place[1] = index
        return sorted({index for ends in found.values() for index in ends})

    def _before(self, part: StagePart, index: int) -> float:
        """What is kept when block `index` begins."""
        start = self.held(self.profile.before.saved) if part.has_before else 0.0
        blocks = self.summed("kept", part.first, index, self.kept)
        return start + self.held(self.profile.shared_saved) + blocks

    def _forward_moments(self, part: StagePart) -> Iterator[tuple[str, Terms]]:
        for index in self._marks(part):
            block = self.chain[index]
            yield (
                "forward",
                {
                    "activations": self._before(part, index) + self._input(block),
                    "computing": self.held(block.forward_live),
                    "copies of weights": self._copies_until(part, index + 1),
                    "gathered parameters": self.gathered(part, index, is_backward=False),
                    "whole gradients": self.whole_grads(part, None) if self.accumulates_whole else 0.0,
                },
            )

    def _copies_until(self, part: StagePart, end: int) -> float:
        found = self.summed("copies", part.first, end - 1, self.block_copies)
        found += self.block_copies(end - 1, is_computing=True)
        return found + (self.weights(self.profile.before.saved, self.profile.before.params) if part.has_before else 0.0)

    def _backward_moments(self, part: StagePart) -> Iterator[tuple[str, Terms]]:
        after = self.profile.after
        done = self.shard_grads(after) if part.has_after and not self.is_sharded else 0.0
        if part.has_after:
            is_fused = self.fused_loss is not None
            computing = self.loss_workspace() + self.head_grad_buffer(), self.head_grad_copy()
            lives = ("the loss", after.forward_live), ("backward of the loss", after.backward_live)
            for (name, live), extra in zip(lives, computing, strict=True):
                yield (
                    name,
                    {
                        "activations": self._before(part, part.end) + self._last_output(part),
                        "computing": self.held(live) + extra,
                        "copies of weights": self.copies(part),
                        "gradients": 0.0 if is_fused and name == "the loss" else done,
                        "whole gradients": self.whole_grads(part, None),
                        "gathered parameters": self.gathered(part, None, is_backward=False),
                    },
                )
        for index in self._marks(part):
            behind = self.summed("shard grads", index + 1, part.end, lambda one: self.shard_grads(self.chain[one]))
            yield from self._block_backward(part, index, done + behind)

    def _block_backward(self, part: StagePart, index: int, ready: float) -> Iterator[tuple[str, Terms]]:
        """The peak of a block's backward; for shards also its end, when its gradients are sent. `ready`: gradients."""
        block = self.chain[index]
        live = self.held(block.backward_live)
        if self.recomputed[index] is Recompute.WHOLE:
            live = max(live, self.held(block.forward_live))
        kept = self._before(part, index) + self._input(block)
        own = self.shard_grads(block)
        yield (
            "backward",
            {
                "activations": kept,
                "computing": live,
                "copies of weights": self._copies_until(part, index + 1),
                "gradients": ready + (0.0 if self.is_sharded else own),
                "whole gradients": self.whole_grads(part, index),
                "gathered parameters": self.gathered(part, index, is_backward=True),
            },
        )
        if self.is_sharded:
            yield (
                "the sending of gradients",
                {
                    "activations": kept,
                    "computing": self._input(block),
                    "gradients": ready + own,
                    "whole gradients": self.whole_grads(part, index),
                    "sent gradients": self.piece_grads(block) * self.reduce_size / self.gather_size,
                    "gathered parameters": self.gathered(part, index, is_backward=True, is_done=True),
                },
            )

    def _last_output(self, part: StagePart) -> float:
        """The input of the head: kept by the norm before it, as what it saves says."""
        saved = self.held(self.profile.after.saved)
        live = self.held(self.profile.after.forward_live)
        last = self.chain[part.end - 1].output_bytes.at(self.samples) if part.end > part.first else 0.0
        return min(last, max(0.0, last + live - saved)) / self._sequence_split() if last else 0.0

    def _update(self) -> Terms:
        params = self.params()
        trained = params.num_bytes(tp=self.tp, ep=self.ep, trained_only=True)
        largest = params.largest_numel * self.param_size
        over = self.shard if self.shard > 1 else 1
        terms = {
            "optimizer temporaries": self.optimizer.temporary_bytes(trained / over, largest / over, self.device_type)
        }
        if self.plan.offload.enabled and self.plan.offload.optimizer_state:
            terms = {}
        if not self.keeps_grads:
            terms["gradients"] = trained / (self.shard if self.is_sharded else 1)
        return terms

    def _gathered_rows(self) -> float:
        """The buffer in which ZeRO-1 gathers what each rank has updated: about 25 MB, or the largest parameter."""
        params = self.params()
        largest = params.largest_numel * self.param_size
        return min(params.num_bytes(trained_only=True), max(_ROWS_BYTES, largest))

    def rank_memory(self, rank: int) -> RankMemory:
        """The moment that needs the most, with the other microbatches in flight."""
        lasting = self.lasting()
        waiting = self._waiting(rank)
        always = sum(lasting.values())
        best: tuple[float, str, Terms] = (-1.0, "", {})
        for moment, terms in self.moments():
            if moment != "the update":
                terms["activations"] = terms.get("activations", 0.0) + waiting
            if "gradients" in lasting:
                terms.pop("gradients", None)
            total = always + sum(terms.values())
            if total > best[0]:
                best = (total, moment, terms)
        whole = _added(lasting, best[2])
        return RankMemory(rank, self._what(), best[1], {name: size for name, size in whole.items() if size > 0})

    def _waiting(self, rank: int) -> float:
        """What microbatches keep beside the one that computes."""
        pp = self.plan.mesh.pp
        if pp == 1:
            return 0.0
        num_stages = pp * self.plan.pipeline.stages_per_rank
        from torsh_distributed.parallel.pipeline.schedule import stages_of_rank

        mine = stages_of_rank(self.plan.pipeline.schedule, rank, num_ranks=pp, num_stages=num_stages)
        part_of = dict(zip(mine, self.parts, strict=True))
        size = {stage: self.kept_by(part) + self.copies(part) for stage, part in part_of.items()}
        totals = [
            sum(count * size[stage] for stage, count in alive.items())
            for alive in microbatches_in_flight(self.plan.pipeline, pp, rank)
        ]
        return max(0.0, max(totals, default=0.0) - min(size.values(), default=0.0))

    def _what(self) -> str:
        blocks = sum(part.end - part.first for part in self.parts)
        around = [
            name
            for name, has in (("embeddings", "has_before"), ("head and loss", "has_after"))
            if any(getattr(part, has) for part in self.parts)
        ]
        return ", ".join([f"{blocks} of {self.profile.num_blocks} blocks", *around])


def _added(lasting: Mapping[str, float], terms: Mapping[str, float]) -> Terms:
    return {name: lasting.get(name, 0.0) + terms.get(name, 0.0) for name in {**lasting, **terms}}
