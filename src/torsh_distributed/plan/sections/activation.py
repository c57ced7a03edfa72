"""Which activations are recomputed instead of kept: the `activation` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section


class ActivationConfig(Section):
    """Activation checkpointing: memory for time."""

    strategy: Literal["none", "uniform", "by_size", "selective"] = "none"
    """What is recomputed in backward: nothing, every n-th layer, large activations, or all but costly operations."""

    every_n_layers: int = Field(default=4, ge=1)
    """The n of `uniform`; 1 recomputes every layer."""

    threshold_mb: float = Field(default=100.0, gt=0)
    """Activations from this size on are recomputed, under `by_size`."""

    offload_to_cpu: bool = False
    """Move what is kept to host memory until backward needs it."""
