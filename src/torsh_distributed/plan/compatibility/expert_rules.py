"""Rules about experts: those of a plan, and those of the layers in a model, which may have settings of their own.

`parallel/expert/choose.py` asks `layer_clashes` for every layer that it finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torsh_distributed.plan.compatibility.axis_rules import splits_model
from torsh_distributed.plan.compatibility.gradient_rules import compresses
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import DEFAULTS, PlanSections
from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.sections.expert import ExpertConfig

RANDOM_KEYS = ("expert.router_jitter", "expert.gate_dropout", "expert.dropout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRule(CompatibilityRule):
    """A rule that layers with experts have to keep too."""

    in_layer: Callable[[PlanSections], bool]
    """Whether a model with experts breaks it under this plan, whose `expert` section is that of a layer."""


def _rule(in_layer: Callable[[PlanSections], bool], **rest: Any) -> ExpertRule:
    """A rule that is broken by a plan, too, as soon as it spreads experts."""
    return ExpertRule(**{"clashes": lambda plan: plan.mesh.ep > 1 and in_layer(plan), "in_layer": in_layer, **rest})


def _is_uneven(plan: PlanSections) -> bool:
    is_spread = plan.mesh.ep > 1 and plan.expert.placement == "contiguous"
    return is_spread and plan.expert.num_experts % plan.mesh.ep != 0


def _experts_elsewhere(plan: PlanSections) -> int:
    """Experts that a rank along mesh.ep does not hold."""
    return plan.expert.num_experts - plan.expert.num_experts // plan.mesh.ep


def _draws_under_tensor(plan: PlanSections) -> bool:
    return plan.mesh.tp > 1 and any(plan.value(key) for key in RANDOM_KEYS)


EXPERT_RULES = (
    _rule(
        _is_uneven,
        name="uneven-experts",
        keys=("expert.num_experts", "mesh.ep"),
        # At its default the model decides: experts of other libraries have a number of their own.
        clashes=lambda plan: plan.expert.num_experts != DEFAULTS.expert.num_experts and _is_uneven(plan),
        reason="every rank holds the same number of experts",
        way_out="make expert.num_experts a multiple of mesh.ep",
        is_impossible=True,
        text=lambda plan: (
            f"expert.num_experts {plan.expert.num_experts} does not spread evenly over mesh.ep {plan.mesh.ep}"
        ),
    ),
    _rule(
        lambda plan: plan.mesh.ep > 1 and plan.expert.hot_copies > _experts_elsewhere(plan),
        name="more-hot-copies-than-experts",
        keys=("expert.hot_copies", "expert.num_experts", "mesh.ep"),
        reason="a rank borrows experts that it does not hold",
        way_out="lower expert.hot_copies; 1 is a good start",
        text=lambda plan: (
            f"expert.hot_copies {plan.expert.hot_copies} is above the {_experts_elsewhere(plan)} of"
            f" {plan.expert.num_experts} experts that a rank does not hold at mesh.ep {plan.mesh.ep}"
        ),
    ),
    _rule(
        lambda plan: plan.mesh.ep > 1 and plan.mesh.shard > 1 and plan.expert.watches_load,
        name="moving-sharded-experts",
        keys=("expert.rebalance_threshold", "expert.hot_copies", "mesh.shard", "mesh.ep"),
        reason="whole experts are moved and lent, and these are sharded",
        way_out="leave the setting out, or use mesh.dp in place of mesh.shard",
    ),
    _rule(
        # FSDP2 averages their gradients as all others where the model is sharded alone.
        lambda plan: compresses(plan) and (plan.mesh.shard == 1 or splits_model(plan)),
        name="compression-with-experts",
        keys=("compress.method", "mesh.ep"),
        clashes=lambda plan: plan.mesh.ep > 1 and compresses(plan),
        reason="gradients of experts are averaged uncompressed, over the ranks that hold the same experts",
        way_out='set compress.method = "none"',
    ),
    _rule(
        lambda plan: plan.mesh.shard == 1 and plan.precision.reduce_dtype != "same",
        name="reduce-dtype-with-experts",
        keys=("precision.reduce_dtype", "mesh.ep"),
        reason="gradients of experts are averaged in the format they have",
        way_out='set precision.reduce_dtype = "same", or shard parameters: mesh.shard above 1',
    ),
    _rule(
        lambda plan: plan.mesh.cp > 1 and plan.expert.overflow != "none",
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
    _rule(
        _draws_under_tensor,
        name="random-experts-with-tensor",
        keys=(*RANDOM_KEYS, "mesh.tp"),
        clashes=_draws_under_tensor,
        reason="ranks that compute the same tokens would draw different numbers",
        way_out="set it to 0, or mesh.tp = 1",
    ),
    _rule(
        lambda plan: plan.mesh.shard > 1 and plan.fsdp.strategy == "shard_optimizer",
        name="sharded-optimizer-with-experts",
        keys=("fsdp.strategy", "mesh.shard", "mesh.ep"),
        reason="the optimizer state alone is sharded over replicas, and experts differ between ranks",
        way_out='shard parameters too: fsdp.strategy = "full_shard"; or use mesh.dp in place of mesh.shard',
    ),
    _rule(
        lambda plan: plan.offload.enabled,
        name="offload-with-experts",
        keys=("offload.enabled", "mesh.ep"),
        reason="offload does not move experts",
        way_out="set offload.enabled = false, or spread experts over more ranks",
    ),
)


def layer_clashes(plan: PlanSections, config: ExpertConfig | None) -> Iterator[Problem]:
    """A problem for every rule that a layer built with `config` breaks under `plan`; None: another library's layer."""
    seen = plan if config is None else plan.model_copy(update={"expert": config})
    for rule in EXPERT_RULES:
        own = [key for key in rule.keys if key.startswith("expert.")]
        if rule.in_layer(seen) and not (config is None and own):
            yield rule.problem(seen, given=[key for key in own if seen.value(key)])
