"""The plan of a demo. Without torch: the command checks the plan before a worker pays for importing it."""

from __future__ import annotations

import os
from pathlib import Path

from torsh_distributed.plan import Plan
from torsh_distributed.train.demos import DEFAULTS


def plan_for(demo: str, path: Path | None, steps: int | None) -> Plan:
    """The plan of a demo: the given file or TORSH_PLAN, or the demo's own defaults; `steps` wins over all."""
    is_given = path is not None or "TORSH_PLAN" in os.environ
    plan = Plan.compose(path, environ=os.environ) if is_given else Plan(training=DEFAULTS[demo])
    return plan if steps is None else plan.replace(training=plan.training.replace(steps=steps))
