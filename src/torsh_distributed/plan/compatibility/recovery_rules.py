"""Rules about what training does when it fails."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.offload_rules import pages_model
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections


def _has_collective_passes(plan: PlanSections) -> bool:
    """Whether ranks communicate in forward or backward of every pass, so that one cannot repeat it alone."""
    mesh = plan.mesh
    return max(mesh.shard, mesh.tp, mesh.pp, mesh.cp, mesh.ep) > 1 or pages_model(plan)


RECOVERY_RULES = (
    CompatibilityRule(
        name="smaller-microbatch-in-parts",
        keys=("recovery.out_of_memory", "mesh.shard", "mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep", "offload.enabled"),
        clashes=lambda plan: plan.recovery.out_of_memory == "smaller_microbatch" and _has_collective_passes(plan),
        reason="ranks that hold parts of the model communicate in every pass, so one cannot repeat it alone",
        way_out='use replicas (mesh.dp), or leave recovery.out_of_memory = "raise" and raise'
        " training.gradient_accumulation",
    ),
    CompatibilityRule(
        name="skipped-batches-are-lost",
        keys=("recovery.divergence", "recovery.skip_batches", "training.exactly_once"),
        clashes=lambda plan: (
            plan.recovery.divergence == "roll_back" and plan.recovery.skip_batches and plan.training.exactly_once
        ),
        reason="batches that are passed over after a roll back are samples that are lost",
        way_out="set recovery.skip_batches = false, or training.exactly_once = false",
    ),
    CompatibilityRule(
        name="roll-back-without-checkpoints",
        keys=("recovery.roll_back_from", "checkpoint.enabled"),
        clashes=lambda plan: (
            plan.recovery.divergence == "roll_back"
            and plan.recovery.roll_back_from == "checkpoint"
            and not plan.checkpoint.enabled
        ),
        reason="there would be nothing to go back to",
        way_out='set checkpoint.enabled = true, or recovery.roll_back_from = "memory"',
    ),
    CompatibilityRule(
        name="copies-in-changing-world",
        keys=("recovery.divergence", "recovery.roll_back_from", "elastic.enabled"),
        clashes=lambda plan: (
            plan.recovery.divergence == "roll_back"
            and plan.recovery.roll_back_from == "memory"
            and plan.elastic.enabled
            and plan.elastic.mode == "in_place"
        ),
        reason="a rank that joins has no copy of an earlier state",
        way_out='set recovery.roll_back_from = "checkpoint" with checkpoint.enabled, or elastic.mode = "restart"',
    ),
)
