"""Rules about offload."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.gradient_rules import compresses
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections


def pages_model(plan: PlanSections) -> bool:
    """Whether offload moves parameters or gradients, and so averages gradients itself."""
    return plan.offload.enabled and (plan.offload.params or plan.offload.grads)


OFFLOAD_RULES = (
    CompatibilityRule(
        name="offload-on-split-model",
        keys=("offload.enabled", "mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep"),
        clashes=lambda plan: plan.offload.enabled and max(plan.mesh.tp, plan.mesh.pp, plan.mesh.cp, plan.mesh.ep) > 1,
        reason="offload works on replicas and on shards only",
        way_out="set offload.enabled = false, or split over mesh.dp and mesh.shard only",
    ),
    CompatibilityRule(
        name="paging-with-shards",
        keys=("offload.enabled", "mesh.shard"),
        clashes=lambda plan: pages_model(plan) and plan.mesh.shard > 1,
        reason="offload.params and offload.grads are for replicas",
        way_out="set offload.params = false and offload.grads = false: the optimizer state of each shard is offloaded",
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
