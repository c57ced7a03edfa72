"""Ready training jobs for `torsh train --demo NAME`."""

from collections.abc import Callable

from torsh_distributed.plan import TrainingConfig
from torsh_distributed.train.demos import gpt, mlp
from torsh_distributed.train.demos.base import Demo

DEMOS: dict[str, Callable[[TrainingConfig], Demo]] = {"gpt": gpt.build, "mlp": mlp.build}

DEFAULTS: dict[str, TrainingConfig] = {
    "gpt": TrainingConfig(steps=200, batch_size=32, learning_rate=2e-3, gradient_clipping=1.0),
    "mlp": TrainingConfig(steps=300, batch_size=100, learning_rate=1e-2),
}
"""The training section of each demo where no plan is given."""

__all__ = ["DEFAULTS", "DEMOS", "Demo"]
