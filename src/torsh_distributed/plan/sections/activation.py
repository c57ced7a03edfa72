"""Which activations are recomputed instead of kept: the `activation` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section


class ActivationConfig(Section):
    """Activation checkpointing: trades time for memory."""

    strategy: Literal["none", "uniform", "by_size", "selective"] = "none"
    """What backward recomputes: nothing, every n-th layer, large activations, or all but costly operations."""

    every_n_layers: int = Field(default=4, ge=1)
    """The n of `uniform`; 1 recomputes every layer."""

    threshold_mb: float = Field(default=100.0, gt=0)
    """Under `by_size`, layers whose activations reach this size are recomputed."""

    offload_to_cpu: bool = False
    """Move the activations that are kept to host memory until backward needs them."""
