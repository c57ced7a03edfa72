"""How long and how each demo trains where no plan is given; without torch, for the command that checks plans first."""

from __future__ import annotations

from torsh_distributed.plan import TrainingConfig

DEFAULTS: dict[str, TrainingConfig] = {
    "gpt": TrainingConfig(steps=150, batch_size=32, learning_rate=2e-3, gradient_clipping=1.0),
    "moe": TrainingConfig(steps=150, batch_size=32, learning_rate=2e-3, gradient_clipping=1.0),
    "mlp": TrainingConfig(steps=300, batch_size=100, learning_rate=1e-2),
}
"""The training section of each demo."""
