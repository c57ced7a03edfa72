"""Which change of a plan would make it fit: each is tried alone, then all that help together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.planner.memory.memory_table import MemoryTable
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
from torsh_distributed.planner.memory.rank_holdings import samples_per_pass
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.model_profile import ModelProfile

_DEGREES = (2, 4, 8)


@dataclass(frozen=True)
class PlanChange:
    """A plan that needs less memory than another one."""

    text: str
    """What is different, in keys of a plan."""
    plan: Plan
    peak_bytes: float


@dataclass(frozen=True)
class MemoryQuestion:
    """Does a plan fit: the model, the optimizer and the memory of a device."""

    profile: ModelProfile
    optimizer: OptimizerProfile
    world_size: int
    limit_bytes: float
    device_type: str = "cuda"

    def table(self, plan: Plan) -> MemoryTable:
        """The estimate for a plan, which must be valid for the world."""
        return estimate_memory(
            self.profile, plan.resolve(self.world_size), self.optimizer, device_type=self.device_type
        )

    def tried(self, plan: Plan, text: str) -> PlanChange | None:
        """The change to `plan`; None if it is not valid for the world or the model."""
        try:
            plan.validate(self.world_size)
            return PlanChange(text, plan, self.table(plan).peak_bytes)
        except ConfigurationError:
            return None

    def closing(self, plan: Plan) -> tuple[list[PlanChange], PlanChange | None]:
        """The single changes after which `plan` fits, the smallest first; else all that help together, fit or not."""
        now = self.table(plan).peak_bytes
        found = [change for change in self._singles(plan) if change.peak_bytes < now]
        closing = [change for change in found if change.peak_bytes <= self.limit_bytes]
        if closing:
            return closing, None
        return [], self._together(plan, now)

    def _singles(self, plan: Plan) -> Iterator[PlanChange]:
        for text, changes in _changes(plan.resolve(self.world_size), self.profile):
            try:
                changed = plan.replace(**changes)
            except ConfigurationError:
                continue
            tried = self.tried(changed, text)
            if tried is not None:
                yield tried

    def _together(self, plan: Plan, now: float) -> PlanChange | None:
        """Take the change that saves the most, again and again, until the plan fits or nothing helps."""
        best: PlanChange | None = None
        texts: list[str] = []
        for _ in range(8):
            options = [one for one in self._singles(plan) if one.peak_bytes < now]
            if not options:
                break
            found = min(options, key=lambda one: one.peak_bytes)
            texts.append(found.text)
            plan, now = found.plan, found.peak_bytes
            best = PlanChange(", ".join(texts), plan, now)
            if now <= self.limit_bytes:
                break
        return best


def _changes(plan: Plan, profile: ModelProfile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes that lower memory, those that cost the least time first; the plan is resolved."""
    mesh, training = plan.mesh, plan.training
    samples, passes = samples_per_pass(plan), training.gradient_accumulation
    if samples > 1 and mesh.pp == 1:
        for factor in _DEGREES:
            if factor <= samples:
                text = f"training.gradient_accumulation = {passes * factor}"
                yield text, {"training": {"gradient_accumulation": passes * factor}}
        if samples not in _DEGREES:
            text = f"training.gradient_accumulation = {passes * samples}"
            yield text, {"training": {"gradient_accumulation": passes * samples}}
    if plan.activation.strategy == "none" and profile.num_blocks:
        yield 'activation.strategy = "selective"', {"activation": {"strategy": "selective"}}
    if profile.num_blocks and (plan.activation.strategy, plan.activation.every_n_layers) != ("uniform", 1):
        text = 'activation.strategy = "uniform", every_n_layers = 1'
        yield text, {"activation": {"strategy": "uniform", "every_n_layers": 1}}
    if mesh.dp > 1:
        yield (
            f"mesh.shard = {mesh.dp * mesh.shard} in place of mesh.dp {mesh.dp}",
            {"mesh": {**mesh.degrees, "dp": 1, "shard": mesh.dp * mesh.shard}, "fsdp": {"strategy": "full_shard"}},
        )
    if mesh.shard > 1 and plan.fsdp.strategy not in ("full_shard", "hybrid_shard"):
        yield 'fsdp.strategy = "full_shard"', {"fsdp": {"strategy": "full_shard"}}
    for axis in ("tp", "pp"):
        yield from _split_further(plan, axis, profile)
    if plan.mesh.tp > 1 and not plan.tensor.sequence_parallel:
        yield "tensor.sequence_parallel = true", {"tensor": {"sequence_parallel": True}}
    if not plan.offload.enabled:
        yield "offload.enabled = true", {"offload": {"enabled": True}}


def _split_further(plan: Plan, axis: str, profile: ModelProfile) -> Iterator[tuple[str, dict[str, Any]]]:
    """More ranks along an axis, taken from shards or replicas."""
    mesh = plan.mesh
    if axis == "tp" and profile.tensor_refusal is not None:
        return
    for source in ("shard", "dp"):
        have = getattr(mesh, source)
        for degree in _DEGREES:
            if have % degree == 0 and have > 1:
                wanted = getattr(mesh, axis) * degree
                changes: dict[str, Any] = {"mesh": {**mesh.degrees, source: have // degree, axis: wanted}}
                if axis == "pp":
                    changes["pipeline"] = {"num_microbatches": max(plan.pipeline.num_microbatches, wanted)}
                yield f"mesh.{axis} = {wanted} with mesh.{source} = {have // degree}", changes
