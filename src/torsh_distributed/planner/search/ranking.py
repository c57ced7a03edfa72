"""Ranks plans for a world: legal by `Plan.validate`, fitting by the estimate, the fastest by the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_profile import MachineProfile
from torsh_distributed.planner.machine.step_time import StepTime, predict_step
from torsh_distributed.planner.memory.memory_table import GB, MemoryTable
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.model_profile import ModelProfile
from torsh_distributed.planner.search.layouts import RECOMPUTING, SHARDING, Mesh, accumulations, meshes, pipelines
from torsh_distributed.planner.search.model_limits import ModelLimits

_TIE = 1.03
"""Predictions nearer than this are no reason to prefer the more complicated plan."""


@dataclass(frozen=True)
class RankedPlan:
    """A plan that fits, with what is predicted of it."""

    plan: Plan
    memory: MemoryTable
    time: StepTime

    @property
    def complexity(self) -> int:
        """How much a reader has to understand of it: axes in use, and what is recomputed."""
        axes = sum(degree > 1 for degree in self.plan.mesh.degrees.values())
        is_plain = self.plan.activation.strategy == "none" and self.plan.pipeline.stages_per_rank == 1
        return 2 * axes + (not is_plain) + (self.plan.fsdp.strategy != "full_shard" and self.plan.mesh.shard > 1)


@dataclass(frozen=True)
class Rejection:
    """A layout that was not chosen, in one sentence."""

    mesh: str
    reason: str


@dataclass
class Ranking:
    """What a search found."""

    plans: list[RankedPlan] = field(default_factory=list)
    """The best first."""
    rejections: list[Rejection] = field(default_factory=list)
    num_tried: int = 0
    smallest: tuple[Plan, MemoryTable] | None = None
    """Of those that do not fit, the one that needs the least; None if some fit."""


_Tried = tuple[Plan, MemoryTable] | str
"""A plan with its estimate, or why it is not legal."""


@dataclass
class PlanSearch:
    """All that decides which plan is best. `base` has the keys that the search leaves alone."""

    profile: ModelProfile
    base: Plan
    machine: MachineProfile
    optimizer: OptimizerProfile
    world_size: int
    limit_bytes: float
    limits: ModelLimits
    is_simple: bool = False
    """Whether to look at replicas and shards only."""

    def rank(self) -> Ranking:
        """Every legal layout that fits, the fastest first; ties within 3 % go to the simpler plan."""
        ranking = Ranking()
        per_node, cp = self.machine.devices_per_node, max(1, self.base.mesh.cp)
        for mesh in meshes(self.world_size, self.profile, devices_per_node=per_node, cp=cp):
            if self.is_simple and max(mesh["tp"], mesh["pp"], mesh["ep"]) > 1:
                continue
            self._try_mesh(mesh, ranking)
        ranking.plans = _ordered(ranking.plans)
        if ranking.plans:
            ranking.smallest = None
        return ranking

    def _try_mesh(self, mesh: Mesh, ranking: Ranking) -> None:
        """The best plan on one mesh, or why there is none."""
        equation = " × ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1) or "one rank"
        batch, with_samples = self.base.training.batch_size, mesh["dp"] * mesh["shard"] * mesh["ep"]
        if batch % with_samples:
            reason = f"a batch of {batch} does not divide over {with_samples} ranks with samples of their own"
            ranking.rejections.append(Rejection(equation, reason))
            return
        local = batch // with_samples
        found: list[RankedPlan] = []
        reason = f"pp {mesh['pp']} needs as many microbatches, and a rank has {local} samples"
        for tried in self._variants(mesh, local):
            ranking.num_tried += 1
            if isinstance(tried, str):
                reason = tried
                continue
            plan, memory = tried
            missing = memory.peak_bytes - self.limit_bytes
            if missing <= 0:
                time = predict_step(self.profile, plan, self.machine, self.optimizer)
                found.append(RankedPlan(plan, memory, time))
                continue
            reason = f"{memory.peak_bytes / GB:.1f} GB, {missing / GB:.1f} GB more than there are"
            if ranking.smallest is None or memory.peak_bytes < ranking.smallest[1].peak_bytes:
                ranking.smallest = tried
        for best in sorted(found, key=lambda one: one.time.total_s):
            try:
                best.plan.validate(self.world_size)
            except ConfigurationError as error:
                reason = error.message.splitlines()[-1].strip()
                continue
            ranking.plans.append(best)
            return
        ranking.rejections.append(Rejection(equation, reason))

    def _variants(self, mesh: Mesh, local: int) -> Iterator[_Tried]:
        """What was tried on a mesh: plans with their estimates, or why one is not legal."""
        for strategy in SHARDING if mesh["shard"] > 1 else ("full_shard",):
            for pipeline in pipelines(mesh["pp"], local):
                yield from self._line(mesh, local, strategy, pipeline)

    def _line(self, mesh: Mesh, local: int, strategy: str, pipeline: dict[str, Any]) -> Iterator[_Tried]:
        """Plans that differ only in what they save memory with: for each way to recompute, the largest that fits."""
        is_first = True
        for _, recomputing in RECOMPUTING if self.profile.num_blocks else RECOMPUTING[:1]:
            for passes in accumulations(local) if mesh["pp"] == 1 else (1,):
                changes = self._changes(mesh, strategy, pipeline, passes, recomputing)
                tried = self._tried(changes, is_legal=not is_first)
                is_first = False
                yield tried
                if isinstance(tried, str):
                    return
                if tried[1].peak_bytes <= self.limit_bytes:
                    break

    def _tried(self, changes: dict[str, Any], *, is_legal: bool) -> _Tried:
        """The changed plan with its estimate, or why it is not legal.

        The first of a line is asked for all of them, which differ in keys that no axis minds; the best is asked again.
        """
        try:
            plan = self.base.replace(**changes)
            if not is_legal:
                plan.validate(self.world_size)
            refusal = self.limits.refusal(plan)
            if refusal is not None:
                return refusal
            memory = estimate_memory(self.profile, plan, self.optimizer, device_type=self.machine.device_type)
        except ConfigurationError as error:
            return error.message.splitlines()[-1].strip()
        return plan, memory

    @staticmethod
    def _changes(
        mesh: Mesh, strategy: str, pipeline: dict[str, Any], passes: int, recomputing: dict[str, Any]
    ) -> dict[str, Any]:
        changes: dict[str, Any] = {"mesh": mesh, "activation": recomputing}
        changes["training"] = {"gradient_accumulation": passes}
        if pipeline:
            changes["pipeline"] = pipeline
        if mesh["shard"] > 1:
            changes["fsdp"] = {"strategy": strategy}
        return changes


def _ordered(plans: list[RankedPlan]) -> list[RankedPlan]:
    """By predicted time; among those as fast as the fastest that is left, the simplest first."""
    left = sorted(plans, key=lambda one: one.time.total_s)
    found: list[RankedPlan] = []
    while left:
        near = [one for one in left if one.time.total_s <= _TIE * left[0].time.total_s]
        best = min(near, key=lambda one: (one.complexity, one.time.total_s))
        found.append(best)
        left.remove(best)
    return found
