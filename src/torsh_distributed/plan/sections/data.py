"""Averaged gradients and sharded state: the sections `ddp` and `fsdp` of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan.problems import Problem, did_you_mean
from torsh_distributed.plan.section import Section, Words

NETWORKS: dict[str, tuple[float, float]] = {
    "infiniband": (50.0, 2.0),
    "100gbe": (50.0, 2.0),
    "25gbe": (25.0, 1.0),
    "10gbe": (25.0, 1.0),
    "wifi6": (10.0, 1.0),
    "1gbe": (10.0, 1.0),
    "wifi5": (5.0, 0.5),
    "slow": (2.0, 0.5),
}
"""Kinds of network, with the sizes of a bucket and of the first one that suit them, in MB."""


class DdpConfig(Section):
    """Gradients are averaged in buckets, while backward still computes the next ones."""

    max_bucket_size_mb: float = Field(default=25.0, gt=0)
    """Capacity of a bucket. Larger ones pay latency less often (fast links: 25 to 50); smaller ones overlap sooner
    (slow links: 1 to 10)."""

    min_bucket_size_mb: float = Field(default=1.0, gt=0)
    """Capacity of the first bucket to fill. Small, so the network is busy early."""

    auto_size: bool = False
    """Measure the link when training starts and choose both sizes from it, in place of the two above."""

    bucketing: bool = True
    """Pack gradients into buckets. Off sends every gradient by itself: slow, to find out which one is at fault."""

    overlap: bool = True
    """Average gradients during backward. Off averages them after it."""

    find_unused_parameters: bool = False
    """Search the graph at every step for parameters that got no gradient. Needed if forward skips layers; costs a walk
    over the graph."""

    static_graph: bool = False
    """Promise that every step uses the same parameters; unused ones are then found once, at the first step."""

    gradient_as_bucket_view: bool = True
    """Let `param.grad` point into the bucket: saves a copy of the gradients; forbids `grad.detach_()`."""

    broadcast_buffers: bool = True
    """Copy buffers, such as the running means of batch norm, from rank 0 at every forward."""

    @classmethod
    def for_network(cls, network: str, **others: Any) -> Self:
        """Bucket sizes for a kind of network ("10GbE", "1GbE", "InfiniBand", "WiFi 6", "slow"), and other fields."""
        name = network.lower().replace(" ", "").replace("-", "")
        if name not in NETWORKS:
            raise InvalidArgument(
                f"the network {network!r} is not known",
                hint=did_you_mean(name, NETWORKS) or f"known: {', '.join(NETWORKS)}; or set auto_size to measure",
            )
        largest, first = NETWORKS[name]
        return cls(**{"max_bucket_size_mb": largest, "min_bucket_size_mb": first, **others})

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.min_bucket_size_mb > self.max_bucket_size_mb:
            yield Problem(
                "min_bucket_size_mb",
                f"ddp.min_bucket_size_mb {self.min_bucket_size_mb:g} is above ddp.max_bucket_size_mb"
                f" {self.max_bucket_size_mb:g}",
                "lower the first or raise the second",
            )
        if self.static_graph and self.find_unused_parameters:
            yield Problem(
                "find_unused_parameters",
                "ddp.find_unused_parameters and ddp.static_graph exclude each other",
                "keep ddp.static_graph if every step uses the same parameters: it finds unused ones once",
            )


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
