"""Rules about what training does when it fails."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.gradient_rules import compresses
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections


def pages_model(plan: PlanSections) -> bool:
    """Whether offload moves whole parameters or gradients, and so averages gradients itself."""
    return plan.offload.enabled and (plan.offload.params or plan.offload.grads) and plan.mesh.shard == 1


def offloads_shards(plan: PlanSections) -> bool:
    """Whether offload moves the shards of parameters and gradients."""
    return plan.offload.enabled and (plan.offload.params or plan.offload.grads) and plan.mesh.shard != 1


def _splits(plan: PlanSections) -> bool:
    return max(plan.mesh.tp, plan.mesh.pp, plan.mesh.cp, plan.mesh.ep) > 1


OFFLOAD_RULES = (
    CompatibilityRule(
        name="offload-on-split-model",
        keys=("offload.enabled", "mesh.tp", "mesh.pp", "mesh.cp"),
        clashes=lambda plan: plan.offload.enabled and max(plan.mesh.tp, plan.mesh.pp, plan.mesh.cp) > 1,
        reason="offload works on replicas and on shards only",
        way_out="set offload.enabled = false, or split over mesh.dp and mesh.shard only",
    ),
    CompatibilityRule(
        name="activations-on-disk-of-split-model",
        keys=("activation.disk_dir", "mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep"),
        clashes=lambda plan: plan.activation.disk_dir is not None and _splits(plan),
        reason="activations of replicas and shards are written to disk, not those of parts of a model or of a sequence",
        way_out="leave activation.disk_dir out, or split over mesh.dp and mesh.shard only",
    ),
    CompatibilityRule(
        name="half-offloaded-shards",
        keys=("offload.params", "offload.grads", "mesh.shard"),
        clashes=lambda plan: offloads_shards(plan) and plan.offload.params != plan.offload.grads,
        reason="the gradient of a shard is where the shard is",
        way_out="set both to true, or both to false: then the optimizer state of each shard is offloaded alone",
    ),
    CompatibilityRule(
        name="offload-with-sharded-optimizer",
        keys=("offload.enabled", "fsdp.strategy"),
        clashes=lambda plan: plan.offload.enabled and plan.mesh.shard > 1 and plan.fsdp.strategy == "shard_optimizer",
        reason="the sharded optimizer keeps its state itself",
        way_out='use fsdp.strategy = "shard_grad_op" or "full_shard" with offload',
    ),
    CompatibilityRule(
        name="paging-with-fp16",
        keys=("offload.enabled", "precision.dtype"),
        clashes=lambda plan: pages_model(plan) and plan.precision.dtype == "fp16",
        reason="offload.params and offload.grads do not support loss scaling",
        way_out='use precision.dtype = "bf16", or set offload.params = false and offload.grads = false',
    ),
    CompatibilityRule(
        name="paging-with-gradient-format",
        keys=("offload.enabled", "compress.method", "precision.reduce_dtype"),
        clashes=lambda plan: pages_model(plan) and (compresses(plan) or plan.precision.reduce_dtype != "same"),
        reason="offload.params and offload.grads send gradients as they are",
        way_out="leave the format out, or set offload.params = false and offload.grads = false",
    ),
)


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
