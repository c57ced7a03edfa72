"""Other names for keys, accepted in files with a notice: older spellings, and times in other units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torsh_distributed.plan.problems import Problem

Assignments = dict[str, Any]
"""Full keys to values: one old key may say what several new ones do."""


def _as(key: str) -> Callable[[Any], Assignments]:
    return lambda value: {key: value}


def _table(key: str, words: Mapping[Any, Assignments]) -> Callable[[Any], Assignments]:
    """By value. A value that is not in the table is passed on under `key`, where validation refuses it."""

    def convert(value: Any) -> Assignments:
        known = value.lower() if isinstance(value, str) else value
        return words[known] if isinstance(known, str | bool) and known in words else {key: value}

    return convert


_MEMORY_STRATEGY = _table(
    "activation.strategy",
    {
        "basic": {"activation.strategy": "none"},
        "standard": {"activation.strategy": "selective"},
        "aggressive": {"activation.strategy": "uniform", "activation.every_n_layers": 1},
        "extreme": {
            "activation.strategy": "uniform",
            "activation.every_n_layers": 1,
            "activation.offload_to_cpu": True,
        },
    },
)
_COMM_STRATEGY = _table(
    "distributed.algorithm",
    {
        "all_reduce": {"distributed.algorithm": "backend"},
        "hierarchical_all_reduce": {"distributed.algorithm": "hierarchical"},
        "ring_all_reduce": {"distributed.algorithm": "ring"},
        "tree_all_reduce": {"distributed.algorithm": "tree"},
        "adaptive": {"distributed.algorithm": "auto"},
    },
)

ALIASES: Mapping[str, Callable[[Any], Assignments]] = {
    "mesh.data_parallel_size": _as("mesh.dp"),
    "mesh.tensor_parallel_size": _as("mesh.tp"),
    "mesh.pipeline_parallel_size": _as("mesh.pp"),
    "mesh.dp_size": _as("mesh.dp"),
    "mesh.tp_size": _as("mesh.tp"),
    "mesh.pp_size": _as("mesh.pp"),
    "mesh.memory_optimization": _MEMORY_STRATEGY,
    "mesh.memory_strategy": _MEMORY_STRATEGY,
    "mesh.communication_strategy": _COMM_STRATEGY,
    "mesh.comm_strategy": _COMM_STRATEGY,
    "ddp.bucket_size_mb": _as("ddp.max_bucket_size_mb"),
    "ddp.enabled": _as("ddp.bucketing"),
    "ddp.overlap_communication": _as("ddp.overlap"),
    "ddp.gradient_accumulation_steps": _as("training.gradient_accumulation"),
    "training.gradient_accumulation_steps": _as("training.gradient_accumulation"),
    "compress.compression_period": _as("compress.period"),
    "expert.expert_dropout": _as("expert.dropout"),
    "fsdp.enable_forward_prefetch": _as("fsdp.forward_prefetch"),
    "fsdp.enable_backward_prefetch": _table(
        "fsdp.backward_prefetch",
        {True: {"fsdp.backward_prefetch": "backward_pre"}, False: {"fsdp.backward_prefetch": "none"}},
    ),
    "pipeline.num_micro_batches": _as("pipeline.num_microbatches"),
    "offload.offload_optimizer_state": _as("offload.optimizer_state"),
    "offload.offload_optimizer_states": _as("offload.optimizer_state"),
    "offload.offload_parameters": _as("offload.params"),
    "offload.offload_params": _as("offload.params"),
    "offload.offload_grads": _as("offload.grads"),
    "offload.compression_method": _as("offload.cpu_compression"),
    "offload.memory_strategy": _as("offload.auto_memory_management"),
    "checkpoint.checkpoint_dir": _as("checkpoint.dir"),
    "checkpoint.checkpoint_interval": _as("checkpoint.every_steps"),
    "checkpoint.checkpoint_frequency": _as("checkpoint.every_steps"),
    "checkpoint.max_time_between_checkpoints_s": _as("checkpoint.every_s"),
    "checkpoint.max_checkpoints_to_keep": _as("checkpoint.keep"),
    "checkpoint.max_checkpoints": _as("checkpoint.keep"),
    "checkpoint.verify_integrity": _as("checkpoint.verify_after_save"),
    "checkpoint.save_best": _table(
        "checkpoint.keep_best",
        {True: {"checkpoint.keep_best": 1}, False: {"checkpoint.keep_best": 0}},
    ),
    "checkpoint.enable_compression": _table(
        "checkpoint.compression_level",
        {True: {"checkpoint.compression_level": 3}, False: {"checkpoint.compression_level": 0}},
    ),
}
"""Old key to the assignments it means."""

_UNITS = {"_secs": 1.0, "_sec": 1.0, "_ms": 1e-3, "_us": 1e-6}


def expand(key: str, value: Any, *, known: frozenset[str]) -> Assignments | None:
    """What the old `key` means in current keys; None if it is not an alias.

    Besides the table: a time named in other units (`heartbeat_timeout_ms`) or without one
    (`timeout`, in seconds) means the key that ends in `_s`.
    """
    if key in known:
        return None
    if key in ALIASES:
        return ALIASES[key](value)
    for suffix, seconds in {"": 1.0, **_UNITS}.items():
        in_seconds = f"{key.removesuffix(suffix)}_s"
        if key.endswith(suffix) and (in_seconds in known or in_seconds in ALIASES):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            converted = value * seconds if suffix and is_number else value
            return {in_seconds: converted} if in_seconds in known else ALIASES[in_seconds](converted)
    return None


def twice(key: str, new: str) -> Problem:
    """The problem of a file that has both spellings."""
    return Problem(key, f"{key} and {new} are both given, and mean the same", f"keep {new}")
