"""The plan of a demo. Without torch: the command checks the plan before a worker pays for importing it."""

from __future__ import annotations

import os
from pathlib import Path

from torsh_distributed.plan import Plan, TrainingConfig

DEFAULTS: dict[str, TrainingConfig] = {
    "gpt": TrainingConfig(steps=150, batch_size=32, learning_rate=2e-3, gradient_clipping=1.0),
    "moe": TrainingConfig(steps=150, batch_size=32, learning_rate=2e-3, gradient_clipping=1.0),
    "mlp": TrainingConfig(steps=300, batch_size=100, learning_rate=1e-2),
}
"""The training section of each demo."""


def plan_for(demo: str, path: Path | None, steps: int | None) -> Plan:
    """The plan of a demo: the given file or TORSH_PLAN, or the demo's own defaults; `steps` wins over all."""
    is_given = path is not None or "TORSH_PLAN" in os.environ
    plan = Plan.compose(path, environ=os.environ) if is_given else Plan(training=DEFAULTS[demo])
    return plan if steps is None else plan.replace(training=plan.training.replace(steps=steps))
