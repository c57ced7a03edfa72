"""How the model's state is sharded over ranks: the `fsdp` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section, Words


class FsdpConfig(Section):
    """What is sharded over the `shard` axis, and in which pieces it is gathered."""

    strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"] = "full_shard"
    """What is sharded: everything (ZeRO-3), gradients and optimizer state (ZeRO-2), optimizer state (ZeRO-1),
    everything within a replica group (hybrid: mesh.dp replicas of mesh.shard ranks), or nothing."""

    wrap: Literal["auto", "size", "none"] = "auto"
    """Which modules are gathered as one piece, if no class or name is given below: the repeated layers of the model (by
    size if it has none), modules of at least `wrap_min_params` parameters, or the whole model."""

    wrap_min_params: int = Field(default=1000, ge=1)
    """With `wrap = "size"`: a module becomes a piece when it has this many parameters outside its own pieces."""

    wrap_classes: Words = ()
    """Class names of modules that are gathered as one piece, such as `TransformerBlock`."""

    wrap_names: Words = ()
    """Patterns of module names that are gathered as one piece, matched part by part: `layers.*` is every layer."""

    ignored_modules: Words = ()
    """Patterns of module names that are not sharded: every rank keeps them whole; gradients are averaged."""

    forward_prefetch: bool = False
    """Gather the next piece while this one computes, in forward. Costs its memory."""

    backward_prefetch: Literal["backward_pre", "backward_post", "none"] = "backward_pre"
    """When the next piece is gathered in backward: before this one's gradients are computed (fastest), or only when it
    is needed (least memory). FSDP2 treats `backward_post` like `none`."""

    max_gathered_ahead: int = Field(default=1, ge=1)
    """Most pieces gathered ahead of the current one, if prefetching is on. More hides longer waits; each costs its
    memory."""

    gather_codec: Literal["none", "bf16", "int8"] = "none"
    """Format in which parameters are gathered: unchanged, rounded to bf16, or to int8 with a scale for every 256. All
    ranks compute with the rounded values; the optimizer updates the exact ones. For slow links."""
