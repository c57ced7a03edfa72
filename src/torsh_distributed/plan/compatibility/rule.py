"""One rule of the table: keys that clash, why, and what to do instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torsh_distributed.plan.describing import show
from torsh_distributed.plan.plan_sections import DEFAULTS, PlanSections
from torsh_distributed.plan.problems import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompatibilityRule:
    """A combination of values that a plan may not have, decided from the plan alone.

    Conditions read degrees of the mesh. Where one is -1, because no world is given, they must be false unless the
    combination is wrong in every world.
    """

    name: str
    """How tests and the reference page call it."""

    keys: tuple[str, ...]
    """The keys that clash. A problem is reported under the first one that the plan sets."""

    clashes: Callable[[PlanSections], bool]
    """Whether this plan has the combination."""

    reason: str
    """Why it is refused, as the end of a sentence."""

    way_out: str
    """What to change."""

    is_impossible: bool = False
    """Refused already when a plan is made: no version could run it."""

    text: Callable[[PlanSections], str] | None = None
    """The sentence, where listing the keys would not show the numbers that matter."""

    def problem(self, plan: PlanSections, *, given: Sequence[str] = ()) -> Problem:
        """What to tell the user of a plan that breaks the rule; `given` keys are shown at their defaults too."""
        given = [key for key in self.keys if key in given or _is_set(plan, key)] or list(self.keys)
        if self.text is not None:
            return Problem(given[0], self.text(plan), self.way_out)
        first, *others = (f"{key} = {show(plan.value(key))}" for key in given)
        clash = f"{first} does not go together with {' and '.join(others)}" if others else first
        return Problem(given[0], f"{clash}: {self.reason}", self.way_out)


def _is_set(plan: PlanSections, key: str) -> bool:
    off = 1 if key.startswith("mesh.") else DEFAULTS.value(key)
    return plan.value(key) != off
