"""Every rule about what goes together in a plan, in one table.

`Plan.validate`, `torsh plan validate` and `parallelize` check all of it, so a plan that validates for a world is not
refused later for a reason known from the plan. What needs the model is checked by the part that reads the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from torsh_distributed.plan.compatibility.axis_rules import AXES_RULES
from torsh_distributed.plan.compatibility.expert_rules import EXPERT_RULES
from torsh_distributed.plan.compatibility.gradient_rules import BATCH_RULES, GRADIENT_RULES, LOSS_RULES
from torsh_distributed.plan.compatibility.recovery_rules import OFFLOAD_RULES, RECOVERY_RULES
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.compatibility.server_rules import SERVER_RULES
from torsh_distributed.plan.compatibility.speed_rules import SPEED_RULES
from torsh_distributed.plan.plan_sections import PlanSections
from torsh_distributed.plan.problems import Problem

RULES: tuple[CompatibilityRule, ...] = (
    *AXES_RULES,
    *GRADIENT_RULES,
    *OFFLOAD_RULES,
    *EXPERT_RULES,
    *BATCH_RULES,
    *LOSS_RULES,
    *SPEED_RULES,
    *RECOVERY_RULES,
    *SERVER_RULES,
)


def broken_rules(plan: PlanSections) -> Iterator[CompatibilityRule]:
    """The rules that `plan` breaks, in the order of the table."""
    return (rule for rule in RULES if rule.clashes(plan))


def clashes_in(plan: PlanSections) -> Iterator[Problem]:
    """A problem for every rule that `plan` breaks."""
    return (rule.problem(plan) for rule in broken_rules(plan))


def impossible_in(plan: PlanSections) -> Iterator[Problem]:
    """A problem for every rule that `plan` breaks and that no version could drop."""
    return (rule.problem(plan) for rule in broken_rules(plan) if rule.is_impossible)
