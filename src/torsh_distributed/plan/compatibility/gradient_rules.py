"""Rules about how gradients travel: compression, formats, algorithms."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.axis_rules import shards_params
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections
from torsh_distributed.plan.sections.compress import METHODS

BUCKET_KEYS = ("distributed.algorithm", "distributed.deterministic", "distributed.rate_limit_gbps")


def compresses(plan: PlanSections) -> bool:
    """Whether gradients travel encoded."""
    return plan.compress.method != "none"


def _sets_buckets(plan: PlanSections) -> bool:
    asked = plan.distributed
    return asked.algorithm != "backend" or asked.deterministic or asked.rate_limit_gbps is not None


def _compresses_shards(plan: PlanSections) -> bool:
    """Whether codecs work inside the reduce-scatter: with replicas of shards they work between the replicas."""
    return compresses(plan) and shards_params(plan) and plan.mesh.dp == 1


def _has_nothing_to_average(plan: PlanSections) -> bool:
    mesh = plan.mesh
    is_alone = mesh.data_degree * mesh.cp == 1 and max(mesh.tp, mesh.pp) > 1
    return is_alone and (compresses(plan) or _sets_buckets(plan) or plan.precision.reduce_dtype != "same")


GRADIENT_RULES = (
    CompatibilityRule(
        name="nothing-to-average",
        keys=("compress.method", "precision.reduce_dtype", *BUCKET_KEYS, "mesh.tp", "mesh.pp"),
        clashes=_has_nothing_to_average,
        reason="no two ranks average gradients here",
        way_out="leave the setting out, or add replicas: mesh.dp above 1",
    ),
    CompatibilityRule(
        name="bucket-settings-with-shards",
        keys=(*BUCKET_KEYS, "mesh.shard"),
        clashes=lambda plan: shards_params(plan) and _sets_buckets(plan),
        reason="shards travel as the backend sends them",
        way_out='leave the setting out, or shard the optimizer only: fsdp.strategy = "shard_optimizer"',
    ),
    CompatibilityRule(
        name="two-formats-for-gradients",
        keys=("compress.method", "precision.reduce_dtype"),
        clashes=lambda plan: (
            compresses(plan)
            and plan.precision.reduce_dtype != "same"
            and (plan.mesh.shard == 1 or plan.fsdp.strategy in ("shard_optimizer", "no_shard"))
        ),
        reason="the codec decides in which format gradients travel",
        way_out='use compress.method = "fp16" or "bf16", or leave precision.reduce_dtype at "same"',
    ),
    CompatibilityRule(
        name="whole-gradient-method-on-shards",
        keys=("compress.method", "mesh.shard"),
        clashes=lambda plan: _compresses_shards(plan) and METHODS[plan.compress.name].needs_whole_gradients,
        reason="the method needs whole gradients, and a rank has those of its shard",
        way_out="choose int8, topk or another method for single elements, or add replicas: mesh.dp above 1",
    ),
    CompatibilityRule(
        name="ef21-on-shards",
        keys=("compress.error_feedback", "mesh.shard"),
        clashes=lambda plan: _compresses_shards(plan) and plan.compress.error_feedback == "ef21",
        reason="ef21 needs whole gradients, and a rank has those of its shard",
        way_out='set compress.error_feedback = "ef14", or add replicas: mesh.dp above 1',
    ),
    CompatibilityRule(
        name="compression-of-shards-with-context",
        keys=("compress.method", "mesh.shard", "mesh.cp"),
        clashes=lambda plan: compresses(plan) and plan.mesh.shard > 1 and plan.mesh.cp > 1,
        reason="shards are averaged over the ranks of a sequence too, where nothing encodes them",
        way_out="leave compression out, or use mesh.dp in place of mesh.shard",
    ),
)
