"""Keywords of torch's FullyShardedDataParallel (FSDP1) and of `fully_shard` (FSDP2), as keys of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torsh_distributed.migrate.plan_draft import (
    PlanDraft,
    Reader,
    in_host_memory,
    refused,
    same_by,
    stays,
    to_key,
    tuning,
)

FORMATS = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}
"""Names of dtypes, and the formats of a plan."""


def word(value: Any) -> str:
    """The last part of a name: of an enum's member, a dtype, a class, a function, or text such as `A.B`."""
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(name if isinstance(name, str) else value).rpartition(".")[2]


def format_of(value: Any) -> str | None:
    """The format of a plan for a dtype; None if a plan has none."""
    return FORMATS.get(word(value).lower())


def parts_of(value: Any) -> dict[str, Any]:
    """The fields of a policy such as MixedPrecision, given as an object or as a table."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return (
        {name: one for name, one in vars(value).items() if not name.startswith("_")}
        if hasattr(value, "__dict__")
        else {}
    )


_STRATEGIES = {
    "FULL_SHARD": ("full_shard", ""),
    "SHARD_GRAD_OP": ("shard_grad_op", ""),
    "NO_SHARD": ("no_shard", "replicas, as under DDP"),
    "HYBRID_SHARD": ("hybrid_shard", "mesh.dp replicas of mesh.shard ranks: set mesh.shard to the ranks of a node"),
}


def _strategy(draft: PlanDraft, key: str, value: Any) -> None:
    name = word(value) if value is not None else "FULL_SHARD"
    if name in ("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"):
        draft.refuse(key, value, "use hybrid_shard, or shard_grad_op over all ranks")
    elif name not in _STRATEGIES:
        draft.problem(key, f"{key} is {name}", f"it may be: {', '.join(_STRATEGIES)}")
    else:
        strategy, reason = _STRATEGIES[name]
        if strategy == "no_shard":
            draft.put("mesh.shard", 1)
            draft.put("mesh.dp", -1)
        draft.honour(key, value, "fsdp.strategy", strategy, reason)


def _offload(draft: PlanDraft, key: str, value: Any) -> None:
    """CPUOffload(offload_params=…), a bool, or FSDP2's policy classes."""
    wanted = value is True or word(type(value)) == "CPUOffloadPolicy" or word(value) == "CPUOffloadPolicy"
    wanted = wanted or bool(parts_of(value).get("offload_params"))
    if wanted:
        in_host_memory(draft, key, value)
    else:
        draft.match(key, value, "", "nothing is offloaded unless asked for")


def _mixed_precision(draft: PlanDraft, key: str, value: Any) -> None:
    if value is None:
        draft.match(key, value, "", "fp32 is the default")
        return
    targets = {"param_dtype": "precision.dtype", "reduce_dtype": "precision.reduce_dtype"}
    targets |= {"buffer_dtype": "precision.buffer_dtype", "output_dtype": "precision.output_dtype"}
    for name, part in parts_of(value).items():
        full = f"{key}.{name}"
        chosen = format_of(part)
        if part is None or name.startswith("_"):
            continue
        if name in targets and chosen is not None:
            draft.honour(full, part, targets[name], chosen)
        elif name in targets:
            draft.refuse(full, part, "formats are fp32, bf16 and fp16")
        elif name == "keep_low_precision_grads" and part:
            draft.refuse(full, part, "gradients of shards are fp32, as the optimizer needs them")
        elif name == "cast_forward_inputs" and "cast_root_forward_inputs" not in parts_of(value):
            draft.honour(full, part, "precision.cast_forward_inputs", bool(part))
        else:
            draft.match(full, part, "", "inputs are cast to the format of computation")


def _prefetch(draft: PlanDraft, key: str, value: Any) -> None:
    name = "NONE" if value is None else word(value)
    table = {"BACKWARD_PRE": "backward_pre", "BACKWARD_POST": "backward_post", "NONE": "none", "NO_PREFETCH": "none"}
    if name in table:
        draft.honour(key, value, "fsdp.backward_prefetch", table[name])
    else:
        draft.problem(key, f"{key} is {name}", f"it may be: {', '.join(table)}")


def _wrap_policy(draft: PlanDraft, key: str, value: Any) -> None:
    """Text, ModuleWrapPolicy, or functools.partial of torch's two policies."""
    if value is None:
        draft.honour(key, value, "fsdp.wrap", "none", "the whole model is one piece")
        return
    name, given = word(getattr(value, "func", value)), getattr(value, "keywords", None) or {}
    if isinstance(value, Mapping):
        name, given = word(value.get("policy", "")), value
    classes = getattr(value, "_module_classes", None) or given.get("transformer_layer_cls")
    if classes:
        draft.honour(key, value, "fsdp.wrap_classes", _names(classes))
    elif name in ("size_based_auto_wrap_policy", "SIZE_BASED_WRAP"):
        draft.put("fsdp.wrap", "size")
        draft.honour(key, value, "fsdp.wrap_min_params", int(given.get("min_num_params", 1e8)))
    elif name in ("transformer_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "ModuleWrapPolicy"):
        draft.honour(
            key, value, "fsdp.wrap", "auto", "the layers that repeat; or name their class in fsdp.wrap_classes"
        )
    elif name in ("always_wrap_policy", "NO_WRAP"):
        draft.honour(key, value, "fsdp.wrap", "none" if name == "NO_WRAP" else "auto")
    else:
        draft.refuse(
            key, value, "pass it to td.FullyShardedDataParallel as wrap_fn, or name classes in fsdp.wrap_classes"
        )


def _names(values: Any) -> list[str]:
    given: Iterable[Any] = values.split(",") if isinstance(values, str) else values
    return sorted(word(one).strip() for one in given)


def _ignored(draft: PlanDraft, key: str, value: Any) -> None:
    if not value:
        draft.match(key, value, "", "nothing is left out unless asked for")
    elif isinstance(value, str) or all(isinstance(one, str) for one in value):
        names = value.split(",") if isinstance(value, str) else list(value)
        draft.honour(key, value, "fsdp.ignored_modules", names)
    else:
        draft.refuse(key, value, "name the modules in fsdp.ignored_modules: a plan has names, not objects")


FSDP1_KEYWORDS: dict[str, Reader] = {
    "process_group": stays("[mesh] of a plan, or group= of td.FullyShardedDataParallel"),
    "sharding_strategy": _strategy,
    "cpu_offload": _offload,
    "auto_wrap_policy": _wrap_policy,
    "backward_prefetch": _prefetch,
    "mixed_precision": _mixed_precision,
    "ignored_modules": _ignored,
    "ignored_states": _ignored,
    "param_init_fn": stays("param_init_fn of td.parallelize", "for models on the meta device"),
    "device_id": same_by("td.device()", "each rank uses the device of its local rank"),
    "sync_module_states": same_by("", "all ranks begin with the parameters of rank 0"),
    "forward_prefetch": to_key("fsdp.forward_prefetch", bool),
    "limit_all_gathers": same_by("fsdp.max_gathered_ahead = 1", "FSDP2 bounds what is gathered ahead"),
    "use_orig_params": same_by("", "FSDP2 shards each parameter: the optimizer sees the model's own"),
    "device_mesh": stays("[mesh] of a plan"),
}
"""Every keyword of torch 2.13's FSDP1."""


def _reshard(draft: PlanDraft, key: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        draft.refuse(key, value, "a piece is kept whole (shard_grad_op) or freed (full_shard) after forward")
    elif value is False:
        draft.honour(key, value, "fsdp.strategy", "shard_grad_op")
    else:
        draft.honour(key, value, "fsdp.strategy", "full_shard")


FULLY_SHARD_KEYWORDS: dict[str, Reader] = {
    "mesh": stays("[mesh] of a plan", "a mesh of two axes is mesh.dp × mesh.shard"),
    "reshard_after_forward": _reshard,
    "shard_placement_fn": refused("parameters are sharded by rows; leave it out"),
    "mp_policy": _mixed_precision,
    "offload_policy": _offload,
    "ignored_params": refused("name their modules in fsdp.ignored_modules", unless=(None, False, ())),
    "dp_mesh_dims": tuning("axes of [mesh] have names"),
}
"""Every keyword of torch 2.13's fully_shard."""
