"""Rules about experts. What depends on the layers of a model is checked by `parallel/expert/choose.py`."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.gradient_rules import compresses
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import DEFAULTS, PlanSections

RANDOM_KEYS = ("expert.router_jitter", "expert.gate_dropout", "expert.dropout")


def _experts_elsewhere(plan: PlanSections) -> int:
    """Experts that a rank along mesh.ep does not hold."""
    return plan.expert.num_experts - plan.expert.num_experts // plan.mesh.ep


EXPERT_RULES = (
    CompatibilityRule(
        name="uneven-experts",
        keys=("expert.num_experts", "mesh.ep"),
        clashes=lambda plan: plan.mesh.ep > 1 and plan.expert.num_experts % plan.mesh.ep != 0,
        reason="every rank holds the same number of experts",
        way_out="make expert.num_experts a multiple of mesh.ep",
        is_impossible=True,
        text=lambda plan: (
            f"expert.num_experts {plan.expert.num_experts} does not spread evenly over mesh.ep {plan.mesh.ep}"
        ),
    ),
    CompatibilityRule(
        name="more-hot-copies-than-experts",
        keys=("expert.hot_copies", "expert.num_experts", "mesh.ep"),
        clashes=lambda plan: plan.mesh.ep > 1 and plan.expert.hot_copies > _experts_elsewhere(plan),
        reason="a rank borrows experts that it does not hold",
        way_out="lower expert.hot_copies; 1 is a good start",
        text=lambda plan: (
            f"expert.hot_copies {plan.expert.hot_copies} is above the {_experts_elsewhere(plan)} of"
            f" {plan.expert.num_experts} experts that a rank does not hold at mesh.ep {plan.mesh.ep}"
        ),
    ),
    CompatibilityRule(
        name="moving-sharded-experts",
        keys=("expert.rebalance_threshold", "expert.hot_copies", "mesh.shard", "mesh.ep"),
        clashes=lambda plan: plan.mesh.ep > 1 and plan.mesh.shard > 1 and plan.expert.watches_load,
        reason="whole experts are moved and lent, and these are sharded",
        way_out="leave the setting out, or use mesh.dp in place of mesh.shard",
    ),
    CompatibilityRule(
        name="compression-with-experts",
        keys=("compress.method", "mesh.ep"),
        clashes=lambda plan: plan.mesh.ep > 1 and compresses(plan),
        reason="gradients of experts are averaged uncompressed, over the ranks that hold the same experts",
        way_out='set compress.method = "none"',
    ),
    CompatibilityRule(
        name="reduce-dtype-with-experts",
        keys=("precision.reduce_dtype", "mesh.ep"),
        clashes=lambda plan: plan.mesh.ep > 1 and plan.mesh.shard == 1 and plan.precision.reduce_dtype != "same",
        reason="gradients of experts are averaged in the format they have",
        way_out='set precision.reduce_dtype = "same", or shard parameters: mesh.shard above 1',
    ),
    CompatibilityRule(
        name="capacity-with-context",
        keys=("expert.overflow", "mesh.ep", "mesh.cp"),
        clashes=lambda plan: (
            plan.mesh.ep > 1
            and plan.mesh.cp > 1
            # At its default the layer decides.
            and plan.expert.overflow not in (DEFAULTS.expert.overflow, "none")
        ),
        reason="capacity is given in the order of tokens, and no rank has them in the order of the batch",
        way_out='set expert.overflow = "none"',
    ),
    CompatibilityRule(
        name="random-experts-with-tensor",
        keys=(*RANDOM_KEYS, "mesh.tp"),
        clashes=lambda plan: plan.mesh.tp > 1 and any(plan.value(key) for key in RANDOM_KEYS),
        reason="ranks that compute the same tokens would draw different numbers",
        way_out="set it to 0, or mesh.tp = 1",
    ),
)
