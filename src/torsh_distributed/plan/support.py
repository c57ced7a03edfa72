"""Which keys of a plan have no effect because another key turns them off: `Plan.notices` reports them."""

from __future__ import annotations

from collections.abc import Mapping

from torsh_distributed.plan.compatibility.recovery_rules import pages_model
from torsh_distributed.plan.plan_sections import PlanSections

GATES: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "fsdp": ("mesh.shard", (1,)),
    "tensor": ("mesh.tp", (1,)),
    "pipeline": ("mesh.pp", (1,)),
    "context": ("mesh.cp", (1,)),
    "offload": ("offload.enabled", (False,)),
    "compile": ("compile.enabled", (False,)),
    "compress": ("compress.method", ("none",)),
    "checkpoint": ("checkpoint.enabled", (False,)),
    "elastic": ("elastic.enabled", (False,)),
    "green": ("green.enabled", (False,)),
    "server": ("server.training", ("none",)),
}
"""Section to the key, and the values of it, that turn the whole section off."""

KEY_GATES: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "fsdp.wrap": ("fsdp.strategy", ("shard_optimizer",)),
    "fsdp.wrap_min_params": ("fsdp.wrap", ("none",)),
    "fsdp.ignored_modules": ("fsdp.strategy", ("shard_optimizer",)),
    "fsdp.forward_prefetch": ("fsdp.strategy", ("shard_optimizer",)),
    "fsdp.backward_prefetch": ("fsdp.strategy", ("shard_optimizer",)),
    "fsdp.max_gathered_ahead": ("fsdp.strategy", ("shard_optimizer",)),
    "fsdp.gather_codec": ("fsdp.strategy", ("shard_optimizer",)),
    "elastic.scaling_interval_s": ("elastic.scaling", ("reactive",)),
    "activation.every_n_layers": ("activation.strategy", ("none", "by_size", "selective", "budget")),
    "activation.threshold_mb": ("activation.strategy", ("none", "uniform", "selective", "budget")),
    "activation.memory_budget_gb": ("activation.strategy", ("none", "uniform", "by_size", "selective")),
    "activation.whole_layers": ("activation.strategy", ("none", "uniform", "by_size", "selective")),
    "activation.selective_layers": ("activation.strategy", ("none", "uniform", "by_size", "selective")),
    "training.auto_optimize_window": ("training.auto_optimize", ("off",)),
    "compress.error_feedback_momentum": ("compress.error_feedback", ("none", "ef21")),
    "compress.ef21_momentum": ("compress.error_feedback", ("none", "ef14")),
    "precision.init_loss_scale": ("precision.dtype", ("fp32", "bf16", "fp8")),
    "precision.loss_scale_growth_interval": ("precision.dtype", ("fp32", "bf16", "fp8")),
    "precision.fp8_recipe": ("precision.dtype", ("fp32", "bf16", "fp16")),
    "precision.fp8_fast_accumulation": ("precision.dtype", ("fp32", "bf16", "fp16")),
    "precision.fp8_skip": ("precision.dtype", ("fp32", "bf16", "fp16")),
    "precision.fp8_emulate": ("precision.dtype", ("fp32", "bf16", "fp16")),
    "recovery.max_loss": ("recovery.divergence", ("raise",)),
    "recovery.max_gradient_norm": ("recovery.divergence", ("raise",)),
    "recovery.roll_back_steps": ("recovery.divergence", ("raise",)),
    "recovery.roll_back_from": ("recovery.divergence", ("raise",)),
    "recovery.max_roll_backs": ("recovery.divergence", ("raise",)),
    "recovery.skip_batches": ("recovery.divergence", ("raise",)),
    "recovery.storage": ("checkpoint.enabled", (False,)),
    "server.staleness": ("server.training", ("elastic_averaging",)),
    "server.alpha": ("server.training", ("asynchronous",)),
    "server.period": ("server.training", ("asynchronous",)),
    "server.waits": ("server.training", ("asynchronous",)),
    "offload.disk_budget_gb": ("offload.disk_dir", (None,)),
    "activation.disk_budget_gb": ("activation.disk_dir", (None,)),
}
"""Key to another one, and the values of that, that turn it off."""


def status_of(plan: PlanSections, key: str) -> str:
    """honoured, or the key that turns this one off."""
    gate = gate_of(plan, key)
    return "honoured" if gate is None else f"off by {gate}"


def gate_of(plan: PlanSections, key: str) -> str | None:
    """The key that turns `key` off in this plan, if one does."""
    section = key.partition(".")[0]
    if key in ("fsdp.wrap_classes", "fsdp.wrap_names") and plan.activation.strategy != "none":
        return None  # they also choose the layers that are recomputed
    for gates, name in ((GATES, section), (KEY_GATES, key)):
        if name in gates:
            gate, off = gates[name]
            if key != gate and plan.value(gate) in off:
                return gate
    return _gate_of_buckets(plan, key) if section == "ddp" else None


def _gate_of_buckets(plan: PlanSections, key: str) -> str | None:
    """Buckets hold whole gradients of replicas: shards and offload send theirs in pieces of their own.

    Stages of a pipeline fill buckets too, but after their backward, so only bucketing and the size have an effect.
    """
    if plan.server.training != "none":
        return "server.training"
    if plan.mesh.pp > 1 and key not in ("ddp.bucketing", "ddp.max_bucket_size_mb"):
        return "mesh.pp"
    if key == "ddp.broadcast_buffers" or plan.mesh.ep > 1:
        return None
    if pages_model(plan):
        return "offload.enabled"
    return "mesh.shard" if plan.mesh.shard != 1 and plan.fsdp.strategy != "shard_optimizer" else None
