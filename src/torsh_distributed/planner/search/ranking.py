"""Ranks plans for a world: legal by `Plan.validate`, fitting by the estimate, the fastest by the prediction."""

from __future__ import annotations

from dataclasses import dataclass, field

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_profile import MachineProfile
from torsh_distributed.planner.machine.step_time import StepPredictor, StepTime
from torsh_distributed.planner.memory.memory_table import GB, MemoryTable
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
from torsh_distributed.planner.memory.rank_memory import estimate_peak
from torsh_distributed.planner.memory.stage_parts import stage_parts
from torsh_distributed.planner.model.model_profile import ModelProfile
from torsh_distributed.planner.search.layouts import Mesh, meshes
from torsh_distributed.planner.search.model_limits import ModelLimits
from torsh_distributed.planner.search.plan_variants import PlanVariants, Variant
from torsh_distributed.planner.search.recompute_budget import RecomputeSearch

_REFINED_LAYOUTS = 10
_REFINED_VARIANTS = 4
"""Of each of them: the fastest ones."""
_TIE = 1.03
"""Predictions nearer than this are no reason to prefer the more complicated plan."""


@dataclass(frozen=True)
class RankedPlan:
    """A plan that fits, with what is predicted of it."""

    plan: Plan
    memory: MemoryTable
    time: StepTime

    @property
    def sample_s(self) -> float:
        """Seconds for each sample of a step: plans may have other batches."""
        return self.time.total_s / self.plan.training.batch_size

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
    tokens_per_sample: int = 1
    limit_bytes: float = 0.0
    """What a rank may use of its device."""
    smallest: tuple[Plan, MemoryTable] | None = None
    """Of those that do not fit, the one that needs the least; None if some fit."""


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
    mean_profile: ModelProfile | None = None
    """Of samples of mean length, which steps take their time for; None where all are equal."""
    is_simple: bool = False
    """Whether to look at replicas and shards only."""
    is_batch_free: bool = False
    """Whether the batch of `base` is what is wanted at least: a layout may take the next one that divides evenly."""

    def __post_init__(self) -> None:
        self._variants = PlanVariants(
            self.base, has_blocks=self.profile.num_blocks > 0, is_batch_free=self.is_batch_free
        )
        if self.mean_profile is not None and self.mean_profile.tokens_per_sample > self.profile.tokens_per_sample:
            raise InvalidArgument(
                f"a mean length of {self.mean_profile.tokens_per_sample} tokens is above the longest,"
                f" {self.profile.tokens_per_sample}",
                hint="give the longest with --sequence",
            )
        self._timed_profile = self.mean_profile or self.profile
        self._predictor = StepPredictor(self._timed_profile, self.machine, self.optimizer)
        device_type = self.machine.device_type
        self._recomputing = RecomputeSearch(self.profile, self._predictor, self.optimizer, device_type)
        self._too_large: dict[str, list[tuple[Variant, float]]] = {}
        """By mesh: plans without recomputation that are faster than the one that fits, the fastest first."""
        self._legal: set[tuple[object, ...]] = set()
        self._illegal: dict[tuple[tuple[int, ...], tuple[object, ...]], str] = {}

    def rank(self) -> Ranking:
        """Every legal layout that fits, the fastest first; ties within 3 % go to the simpler plan."""
        ranking = Ranking(tokens_per_sample=self._timed_profile.tokens_per_sample, limit_bytes=self.limit_bytes)
        per_node, cp = self.machine.devices_per_node, max(1, self.base.mesh.cp)
        for mesh in meshes(self.world_size, self.profile, devices_per_node=per_node, cp=cp):
            if self.is_simple and max(mesh["tp"], mesh["pp"], mesh["ep"]) > 1:
                continue
            self._try_mesh(mesh, ranking)
        if ranking.plans:
            times = sorted(one.sample_s for one in ranking.plans)
            worst_s = times[min(_REFINED_LAYOUTS, len(times)) - 1]
            ranking.plans = [self._with_less_recomputed(one, worst_s) for one in ranking.plans]
        ranking.plans = _ordered(ranking.plans)
        if ranking.plans:
            ranking.smallest = None
        return ranking

    def _try_mesh(self, mesh: Mesh, ranking: Ranking) -> None:
        """The best plan on one mesh, or why there is none."""
        equation = " × ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1) or "one rank"
        batch, with_samples = self.base.training.batch_size, mesh["dp"] * mesh["shard"] * mesh["ep"]
        if batch % with_samples and not self.is_batch_free:
            less = batch // with_samples * with_samples
            near = f"{less} or {less + with_samples}" if less else f"{with_samples}"
            reason = (
                f"a batch of {batch} does not divide over {with_samples} ranks with samples of their own; {near} does"
            )
            ranking.rejections.append(Rejection(equation, reason))
            return
        local = -(-batch // with_samples)
        found = self._best(mesh, local, ranking)
        if isinstance(found, str):
            ranking.rejections.append(Rejection(equation, found))
        else:
            ranking.plans.append(found)

    def _best(self, mesh: Mesh, local: int, ranking: Ranking) -> RankedPlan | str:
        """The fastest plan on a mesh that is legal and fits; else the last reason why one is not.

        Times are predicted first: they are cheap, and only plans faster than the one that is found need more.
        """
        reason = f"pp {mesh['pp']} needs as many microbatches, and a rank has {local} samples"
        timed: list[tuple[float, int, Variant, StepTime]] = []
        for number, variant in enumerate(self._variants.on(mesh, local)):
            ranking.num_tried += 1
            refused = self._refusal(variant)
            if refused is not None:
                reason = refused
                continue
            time = self._predictor.step_time(variant.plan)
            timed.append((time.total_s / variant.plan.training.batch_size, number, variant, time))
        for place, (_, _, variant, time) in enumerate(sorted(timed)):
            memory = estimate_peak(self.profile, variant.plan, self.optimizer, device_type=self.machine.device_type)
            missing = memory.peak_bytes - self.limit_bytes
            if missing <= 0:
                try:
                    plan = self.base.replace(**variant.changes)
                    plan.validate(self.world_size)
                except ConfigurationError as error:
                    reason = _last_line(error)
                    continue
                self._too_large[plan.mesh.equation] = [
                    (one, none_s)
                    for none_s, _, one, _ in sorted(timed)[:place]
                    if one.plan.activation.strategy == "none"
                ]
                return RankedPlan(plan, memory, time)
            reason = f"{memory.peak_bytes / GB:.1f} GB, {missing / GB:.1f} GB more than there are"
            if ranking.smallest is None or memory.peak_bytes < ranking.smallest[1].peak_bytes:
                ranking.smallest = variant.plan, memory
        return reason

    def _with_less_recomputed(self, found: RankedPlan, worst_s: float) -> RankedPlan:
        """`found`, or a faster plan of its mesh that fits once some of its blocks are recomputed.

        Looked for where it could be among the first `_REFINED_LAYOUTS`, of which the last takes `worst_s` a sample.
        """
        for variant, none_s in self._too_large[found.plan.mesh.equation][:_REFINED_VARIANTS]:
            if none_s >= min(worst_s, found.sample_s) or not self.profile.num_blocks:
                break
            changed = self._recomputing.within(variant.plan, self.limit_bytes)
            if changed is None or changed.activation.strategy != "budget":
                continue  # as the variants have it
            time = self._predictor.step_time(changed)
            if time.total_s / changed.training.batch_size < found.sample_s:
                try:
                    plan = self.base.replace(**variant.changes).replace(activation=self._budget_keys(changed))
                    plan.validate(self.world_size)
                except ConfigurationError:  # as of a model that is compiled as a whole
                    continue
                memory = estimate_peak(self.profile, plan, self.optimizer, device_type=self.machine.device_type)
                found = RankedPlan(plan, memory, time)
        return found

    def _budget_keys(self, plan: Plan) -> dict[str, object]:
        chosen = plan.activation
        layers = {"whole_layers": chosen.whole_layers, "selective_layers": chosen.selective_layers}
        return {"strategy": "budget", "memory_budget_gb": self.limit_bytes / GB, **layers}

    def _refusal(self, variant: Variant) -> str | None:
        """Why a plan of this kind is not legal, or the model refuses it; the one that is chosen is asked again.

        Where the first of a kind is legal on any mesh, what else differs are numbers, which may still be refused at the
        end. Where it is not, numbers may be why: each mesh is asked.
        """
        mesh = tuple(variant.plan.mesh.degrees.values())
        if variant.kind not in self._legal and (mesh, variant.kind) not in self._illegal:
            try:
                self.base.replace(**variant.changes).validate(self.world_size)
                self._legal.add(variant.kind)
            except ConfigurationError as error:
                self._illegal[mesh, variant.kind] = _last_line(error)
        if (mesh, variant.kind) in self._illegal:
            return self._illegal[mesh, variant.kind]
        try:
            stage_parts(self.profile, variant.plan)
        except ConfigurationError as error:
            return _last_line(error)
        return self.limits.refusal(variant.plan)


def _last_line(error: ConfigurationError) -> str:
    return error.message.splitlines()[-1].strip()


def _ordered(plans: list[RankedPlan]) -> list[RankedPlan]:
    """By predicted time of a sample; among those as fast as the fastest that is left, the simplest first."""
    left = sorted(plans, key=lambda one: one.sample_s)
    found: list[RankedPlan] = []
    while left:
        near = [one for one in left if one.sample_s <= _TIE * left[0].sample_s]
        best = min(near, key=lambda one: (one.complexity, one.sample_s))
        found.append(best)
        left.remove(best)
    return found
