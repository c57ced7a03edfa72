"""How the model's state is sharded over ranks: the `fsdp` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.base import Section, Words


class FsdpConfig(Section):
    """What is sharded over the `shard` axis, and in which pieces it travels."""

    strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"] = "full_shard"
    """What each rank keeps only a shard of: everything (ZeRO-3), gradients and optimizer state (ZeRO-2), optimizer
    state (ZeRO-1), everything within a replica group (hybrid: mesh.dp replicas of mesh.shard ranks), or nothing."""

    wrap_min_params: int = Field(default=1000, ge=0)
    """A module with at least this many parameters travels as one piece. Used where no class or name is given below."""

    wrap_classes: Words = ()
    """Class names of modules that travel as one piece, such as `TransformerBlock`."""

    wrap_names: Words = ()
    """Patterns of module names that travel as one piece, such as `layers.*`."""

    ignored_modules: Words = ()
    """Patterns of module names that are not sharded."""

    forward_prefetch: bool = False
    """Gather the next module's parameters while this one computes, in forward. Costs their memory."""

    backward_prefetch: Literal["backward_pre", "backward_post", "none"] = "backward_pre"
    """When the next module's parameters are gathered in backward: before this module's gradients are computed
    (fastest), after them (less memory), or not ahead at all."""
