"""Which keys of a plan this version honours. The one place: a capability that lands adds its keys here.

Why: a plan describes more than is built so far. A key that would be ignored is refused instead
(`Plan.require_supported`), and `Plan.explain` says of every key whether it has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from torsh_distributed.plan.plan_sections import PlanSections

HONOURED: Mapping[str, tuple[str, ...] | None] = {
    "mesh.dp": None,
    "mesh.shard": None,
    "mesh.tp": None,
    "mesh.pp": None,
    "mesh.cp": None,
    "mesh.ep": None,
    "distributed.backend": None,
    "distributed.timeout_s": None,
    "distributed.algorithm": None,
    "distributed.deterministic": None,
    "distributed.rate_limit_gbps": None,
    "ddp.max_bucket_size_mb": None,
    "ddp.min_bucket_size_mb": None,
    "ddp.auto_size": None,
    "ddp.bucketing": None,
    "ddp.overlap": None,
    "ddp.find_unused_parameters": None,
    "ddp.static_graph": None,
    "ddp.gradient_as_bucket_view": None,
    "ddp.broadcast_buffers": None,
    "fsdp.strategy": None,
    "fsdp.wrap": None,
    "fsdp.wrap_min_params": None,
    "fsdp.wrap_classes": None,
    "fsdp.wrap_names": None,
    "fsdp.ignored_modules": None,
    "fsdp.forward_prefetch": None,
    "fsdp.backward_prefetch": None,
    "fsdp.max_gathered_ahead": None,
    "fsdp.gather_codec": None,
    "tensor.sequence_parallel": None,
    "tensor.loss_parallel": None,
    "pipeline.num_microbatches": None,
    "pipeline.schedule": None,
    "pipeline.stages_per_rank": None,
    "pipeline.balance": None,
    "pipeline.split_points": None,
    "activation.strategy": None,
    "activation.every_n_layers": None,
    "activation.threshold_mb": None,
    "activation.offload_to_cpu": None,
    "precision.dtype": ("fp32", "bf16", "fp16"),
    "precision.reduce_dtype": None,
    "precision.buffer_dtype": None,
    "precision.init_loss_scale": None,
    "precision.loss_scale_growth_interval": None,
    "compress.method": None,
    "compress.error_feedback": None,
    "compress.error_feedback_momentum": None,
    "compress.ef21_momentum": None,
    "compress.warmup_steps": None,
    "compress.period": None,
    "compress.skip_below_numel": None,
    "compress.skip_names": None,
    "expert.num_experts": None,
    "expert.num_experts_per_token": None,
    "expert.capacity_factor": None,
    "expert.overflow": None,
    "expert.normalize_weights": None,
    "expert.load_balance_loss_coeff": None,
    "expert.router_z_loss_coeff": None,
    "expert.router_jitter": None,
    "expert.gate_dropout": None,
    "expert.gate_layers": None,
    "expert.gate_groups": None,
    "expert.gate_grouping": None,
    "expert.gate_top_groups": None,
    "expert.dropout": None,
    "expert.initialization": None,
    "expert.placement": None,
    "expert.rebalance_threshold": None,
    "expert.rebalance_cooldown_steps": None,
    "expert.hot_copies": None,
    "expert.load_smoothing": None,
    "offload.enabled": None,
    "offload.params": None,
    "offload.grads": None,
    "offload.optimizer_state": None,
    "offload.cpu_memory_budget_gb": None,
    "offload.gpu_memory_budget_gb": None,
    "offload.disk_dir": None,
    "offload.disk_budget_gb": None,
    "offload.device_optimizer_ratio": None,
    "offload.prefetch_buffer_size": None,
    "offload.pin_cpu_memory": None,
    "offload.cpu_compression": None,
    "offload.auto_memory_management": None,
    "observe.events_dir": None,
    "training.steps": None,
    "training.batch_size": None,
    "training.gradient_accumulation": None,
    "training.gradient_clipping": None,
    "training.learning_rate": None,
    "training.lr_scaling": None,
    "training.warmup_steps": None,
    "training.seed": None,
    "training.log_every": None,
}
"""Key to the values it may take today, or None where all of them work."""


GATES: Mapping[str, tuple[str, object]] = {
    "fsdp": ("mesh.shard", 1),
    "tensor": ("mesh.tp", 1),
    "pipeline": ("mesh.pp", 1),
    "offload": ("offload.enabled", False),
    "compress": ("compress.method", "none"),
    "checkpoint": ("checkpoint.enabled", False),
    "elastic": ("elastic.enabled", False),
}
"""Section to the key, and the value of it, that turns the whole section off."""


def is_honoured(key: str, value: object) -> bool:
    """Whether `value` under `key` has its effect in this version."""
    if key not in HONOURED:
        return False
    values = HONOURED[key]
    return values is None or value in values


def status_of(plan: PlanSections, key: str) -> str:
    """honoured, not yet, or the key that turns this one off."""
    gate = _gate_of(plan, key)
    if gate is not None:
        return f"off by {gate}"
    return "honoured" if is_honoured(key, plan.value(key)) else "not yet"


def _gate_of(plan: PlanSections, key: str) -> str | None:
    """The key that turns `key` off in this plan, if one does."""
    section = key.partition(".")[0]
    gate, off = GATES.get(section, (key, None))
    if key != gate and plan.value(gate) == off:
        return gate
    return _gate_of_buckets(plan, key) if section == "ddp" else None


def _gate_of_buckets(plan: PlanSections, key: str) -> str | None:
    """Buckets are for whole gradients on replicas: shards and pages send theirs in pieces of their own.

    Stages of a pipeline fill buckets too, but once their backward is over, so that only the size means something.
    """
    if plan.mesh.pp > 1 and key not in ("ddp.bucketing", "ddp.max_bucket_size_mb"):
        return "mesh.pp"
    if key == "ddp.broadcast_buffers" or plan.mesh.ep > 1:
        return None
    if plan.offload.enabled and (plan.offload.params or plan.offload.grads):
        return "offload.enabled"
    return "mesh.shard" if plan.mesh.shard != 1 and plan.fsdp.strategy != "shard_optimizer" else None
