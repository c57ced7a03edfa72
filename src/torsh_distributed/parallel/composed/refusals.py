"""What does not go together on a mesh that splits the model or its sequences: refused before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.pipeline.schedule import SPLITS_BACKWARD
from torsh_distributed.plan import Plan

Clash = tuple[str, bool, str]
"""What is asked for, whether this plan asks for it, and what to do instead."""


def refuse(plan: Plan) -> None:
    """Raise ConfigurationError for what these axes do not go together with, the same on every rank."""
    split = [axis for axis in ("ep", "tp", "pp", "cp") if plan.mesh.degrees[axis] > 1]
    named = " × ".join(f"{axis} {plan.mesh.degrees[axis]}" for axis in split)
    for what, is_wanted, hint in (*_of_axes(plan), *_of_gradients(plan)):
        if is_wanted:
            raise ConfigurationError(f"{what} does not go together with {named} in this version", hint=hint)


def _of_axes(plan: Plan) -> Iterator[Clash]:
    mesh = plan.mesh
    yield (
        "fsdp.strategy = shard_optimizer",
        mesh.shard > 1 and plan.fsdp.strategy == "shard_optimizer",
        "shard parameters too: fsdp.strategy = full_shard",
    )
    yield "offload", plan.offload.enabled, "set offload.enabled = false"
    # Half a backward looks for the parameters that forward used: they must still be there.
    yield (
        f"pipeline.schedule = {plan.pipeline.schedule} with parameters that are freed after forward",
        mesh.pp > 1
        and mesh.shard > 1
        and plan.pipeline.schedule in SPLITS_BACKWARD
        and plan.fsdp.strategy != "shard_grad_op",
        "keep them gathered: fsdp.strategy = shard_grad_op",
    )


def _of_gradients(plan: Plan) -> Iterator[Clash]:
    """How gradients travel means something where ranks average them, and to shards only in part."""
    asked = plan.distributed
    of_buckets = asked.algorithm != "backend" or asked.deterministic or asked.rate_limit_gbps is not None
    names = "distributed.algorithm, deterministic or rate_limit_gbps"
    yield f"{names} with mesh.shard", of_buckets and plan.mesh.shard > 1, "leave them out: shards travel by the backend"
    is_alone = plan.mesh.data_degree * plan.mesh.cp == 1
    hint = "leave it out, or add replicas: mesh.dp above 1; no gradients are averaged here"
    yield names, of_buckets and is_alone, hint
    yield f"compress.method = {plan.compress.method}", plan.compress.method != "none" and is_alone, hint
    yield (
        f"compress.method = {plan.compress.method} with mesh.shard",
        plan.compress.method != "none" and plan.mesh.shard > 1 and plan.mesh.cp > 1,
        "leave one of the two out, or use mesh.dp in place of mesh.shard",
    )
    reduce_dtype = plan.precision.reduce_dtype
    yield f"precision.reduce_dtype = {reduce_dtype}", reduce_dtype != "same" and is_alone, hint
