"""Ready training jobs for `torsh demo NAME`."""

from collections.abc import Callable

from torsh_distributed.plan import Plan, TrainingConfig
from torsh_distributed.train.demos import gpt, mlp, moe
from torsh_distributed.train.demos.base import Demo

DEMOS: dict[str, Callable[[Plan], Demo]] = {
    "gpt": lambda plan: gpt.build(plan.training),
    "mlp": lambda plan: mlp.build(plan.training),
    "moe": lambda plan: moe.build(plan.training, plan.expert),
}

DEFAULTS: dict[str, TrainingConfig] = {
    "gpt": TrainingConfig(steps=150, batch_size=32, learning_rate=2e-3, gradient_clipping=1.0),
    "moe": TrainingConfig(steps=150, batch_size=32, learning_rate=2e-3, gradient_clipping=1.0),
    "mlp": TrainingConfig(steps=300, batch_size=100, learning_rate=1e-2),
}
"""The training section of each demo where no plan is given."""

__all__ = ["DEFAULTS", "DEMOS", "Demo"]
