"""ZeRO stages, offload and the degrees of parallelism, as [mesh], [fsdp] and [offload]."""

from __future__ import annotations

from pathlib import Path

from torsh_distributed.migrate.deepspeed.config.translation import Translation

_STRATEGIES = {1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
_ZERO = "zero_optimization"
_OPTIMIZER, _PARAM = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"


def translate_mesh(one: Translation) -> None:
    """Degrees first: what shards and what is offloaded depends on them."""
    _degrees(one)
    _offload(one)
    _stage(one)
    _quantized(one)
    _small_keys(one)


def degree(one: Translation, axis: str) -> int:
    """The degree of an axis as set so far."""
    return int(one.sections.get("mesh", {}).get(axis, 1))


def is_split(one: Translation) -> bool:
    """Whether ranks hold parts of the model or of a sequence beside shards."""
    return any(degree(one, axis) > 1 for axis in ("tp", "pp", "cp", "ep"))


def _degrees(one: Translation) -> None:
    tensor = one.get("tensor_parallel.autotp_size") or one.get("tensor_parallel.tp.tp_size") or 1
    means = one.set("mesh.tp", int(tensor)) if tensor > 1 else ""
    one.honoured("tensor_parallel.autotp_size", means)
    one.honoured("tensor_parallel.tp.tp_size", means)
    stages = one.get("pipeline.stages")
    stages = int(stages) if isinstance(stages, int | float) else 1
    one.honoured("pipeline.stages", one.set("mesh.pp", stages) if stages > 1 else "")
    sequence = int(one.get("sequence_parallel_size") or 1)
    if sequence > 1:
        means = f"{one.set('mesh.cp', sequence)}, {one.set('context.form', 'ulysses')}"
        one.honoured("sequence_parallel_size", means)
    else:
        one.honoured("sequence_parallel_size")
    one.hint("data_parallel_size", "the ranks that the other axes leave: mesh.dp or mesh.shard fills the world")
    if one.is_on("expert_parallel"):
        experts = int(one.get("expert_parallel.autoep_size"))
        one.honoured("expert_parallel.enabled")
        one.honoured("expert_parallel.autoep_size", one.set("mesh.ep", experts) if experts > 1 else "")
        if one.get("expert_parallel.expert_tensor_parallel_size") != 1:
            one.refuse("expert_parallel.expert_tensor_parallel_size", "an expert is whole on its rank: write 1")
        else:
            one.honoured("expert_parallel.expert_tensor_parallel_size")
    _pipeline(one)


def _pipeline(one: Translation) -> None:
    method = str(one.get("pipeline.partition")).lower()
    if method == "parameters":
        one.honoured("pipeline.partition", one.set("pipeline.balance", "parameters"))
    elif method in ("best", "uniform", "auto"):
        one.hint("pipeline.partition", "stages are balanced by estimated cost", "pipeline.balance = auto")
    else:
        one.refuse("pipeline.partition", "name the first layer of each stage in pipeline.split_points")
    interval = int(one.get("pipeline.activation_checkpoint_interval") or 0)
    if interval:
        one.set("activation.strategy", "uniform")
        one.honoured("pipeline.activation_checkpoint_interval", one.set("activation.every_n_layers", interval))
    else:
        one.honoured("pipeline.activation_checkpoint_interval")


def _device(one: Translation, section: str, old_name: str) -> str:
    """Where a section offloads to: none, cpu or nvme; files of old versions have one flag for it."""
    if one.has(f"{section}.device"):
        return str(one.get(f"{section}.device")).lower()
    return "cpu" if one.get(f"{_ZERO}.{old_name}") else "none"


def _offload(one: Translation) -> None:
    stage = int(one.get(f"{_ZERO}.stage"))
    state, params = _device(one, _OPTIMIZER, "cpu_offload"), _device(one, _PARAM, "cpu_offload_params")
    if params == "none" and one.get(f"{_ZERO}.cpu_offload_param"):
        params = "cpu"
    for section, device in ((_OPTIMIZER, state), (_PARAM, params)):
        if device == "nvme" and not one.has(f"{section}.nvme_path"):
            one.wrong(f"{section}.nvme_path", f"{section}.device is nvme, but {section}.nvme_path is not given")
    state_keys = (f"{_OPTIMIZER}.device", f"{_ZERO}.cpu_offload")
    param_keys = (f"{_PARAM}.device", f"{_ZERO}.cpu_offload_params", f"{_ZERO}.cpu_offload_param")
    why_not = _why_not_params(one, stage) if params != "none" else ""
    has_params = params != "none" and not why_not
    reason = _refusal(one, stage) if state != "none" or params != "none" else ""
    for key in state_keys:
        if state == "none":
            one.honoured(key)
        elif reason:
            one.refuse(key, reason)
        else:
            one.honoured(key, "offload.optimizer_state = true")
    for key in param_keys:
        if params == "none":
            one.honoured(key)
        elif why_not:
            one.refuse(key, why_not)
        else:
            one.honoured(key, "offload.params = true", "the update runs on the host, where the optimizer state is too")
    if (state != "none" and not reason) or has_params:
        _set_offload(one, state, params, has_params=has_params)
    for section, device in ((_OPTIMIZER, state), (_PARAM, params)):
        if one.has(f"{section}.nvme_path"):
            _give_path(one, f"{section}.nvme_path", is_used=device == "nvme")
        one.honoured(f"{section}.pin_memory", f"offload.pin_cpu_memory = {str(_is_pinned(one)).lower()}")
    one.honoured(f"{_ZERO}.cpu_offload_use_pin_memory", "offload.pin_cpu_memory")
    ratio = float(one.get(f"{_OPTIMIZER}.ratio"))
    if ratio < 1 and stage != 3:
        one.wrong(
            f"{_OPTIMIZER}.ratio", f"{_OPTIMIZER}.ratio {ratio:g} needs stage 3", "leave it out, or set stage to 3"
        )
    one.honoured(f"{_OPTIMIZER}.ratio", f"offload.device_optimizer_ratio = {1 - ratio:g}")


def _set_offload(one: Translation, state: str, params: str, *, has_params: bool) -> None:
    one.set("offload.enabled", True)
    one.set("offload.params", has_params)
    one.set("offload.grads", has_params)
    one.set("offload.optimizer_state", True)
    one.set("offload.pin_cpu_memory", _is_pinned(one))
    ratio = float(one.get(f"{_OPTIMIZER}.ratio"))
    if ratio < 1:
        one.set("offload.device_optimizer_ratio", 1 - ratio)
    for section, device in ((_OPTIMIZER, state), (_PARAM, params)):
        if device == "nvme" and one.has(f"{section}.nvme_path"):
            one.set("offload.disk_dir", str(one.get(f"{section}.nvme_path")))


def _refusal(one: Translation, stage: int) -> str:
    """Why optimizer state cannot be offloaded; empty if it can."""
    if is_split(one):
        return "offload works on replicas and shards: leave it out, or the split of layers, stages and sequences"
    return "" if stage else "optimizer state is offloaded shard by shard: set zero_optimization.stage to 1, 2 or 3"


def _why_not_params(one: Translation, stage: int) -> str:
    """Why parameters cannot be offloaded; empty if they can."""
    if stage != 3:
        return "DeepSpeed offloads parameters in stage 3 only"
    if is_split(one):
        return _refusal(one, stage)
    if _is_fp16(one) and one.world_size == 1:
        return "parameters of one rank are paged, without loss scaling: use bf16"
    return ""


def _is_fp16(one: Translation) -> bool:
    return bool(one.get("fp16.enabled"))


def _is_pinned(one: Translation) -> bool:
    if one.has(f"{_ZERO}.cpu_offload_use_pin_memory"):
        return bool(one.get(f"{_ZERO}.cpu_offload_use_pin_memory"))
    used = [section for section in (_OPTIMIZER, _PARAM) if one.has(f"{section}.pin_memory")]
    return any(one.get(f"{section}.pin_memory") for section in used) if used else True


def _give_path(one: Translation, key: str, *, is_used: bool) -> None:
    path = Path(str(one.get(key)))
    if not is_used:
        one.honoured(key, "", "off: the device is not nvme")
    elif path.is_dir():
        one.equivalent(key, f"offload.disk_dir = {path}", "used for what does not fit in offload.cpu_memory_budget_gb")
    else:
        one.equivalent(
            key,
            f"offload.disk_dir = {path}",
            "used for what does not fit in offload.cpu_memory_budget_gb; there is no such directory on this machine",
        )


def _stage(one: Translation) -> None:
    key, stage = f"{_ZERO}.stage", int(one.get(f"{_ZERO}.stage"))
    if stage == 0:
        one.honoured(key, "replicas: mesh.dp fills the world")
        one.honoured(f"{_ZERO}.mics_shard_size", "", "off in stage 0")
        return
    offloads = bool(one.sections.get("offload"))
    is_paged = bool(one.sections.get("offload", {}).get("params")) and one.world_size == 1
    if is_paged:
        one.equivalent(key, "offload.params = true", "one rank holds all shards; parameters are paged")
        one.honoured(f"{_ZERO}.mics_shard_size", "", "one rank holds all shards")
        return
    groups = int(one.get(f"{_ZERO}.mics_shard_size"))
    one.honoured(f"{_ZERO}.mics_shard_size", "mesh.shard = -1" if groups > 1 else "")
    if groups > 1 and one.world_size != groups:
        one.set("mesh.dp", -1)
        one.set("mesh.shard", groups)
        one.honoured(f"{_ZERO}.mics_shard_size", f"mesh.shard = {groups}, mesh.dp = -1")
        one.honoured(key, one.set("fsdp.strategy", "hybrid_shard"))
        return
    one.set("mesh.dp", 1)
    one.set("mesh.shard", -1)
    strategy = _STRATEGIES[stage]
    if stage == 1 and (offloads or is_split(one)):
        means = one.set("fsdp.strategy", "shard_grad_op")
        one.equivalent(key, means, "gradients are sharded too, which offload and split models need")
    else:
        one.honoured(key, one.set("fsdp.strategy", strategy))


def _quantized(one: Translation) -> None:
    is_sharded = int(one.get(f"{_ZERO}.stage")) == 3
    if one.get(f"{_ZERO}.zero_quantized_weights") and is_sharded:
        means = one.set("fsdp.gather_codec", "int8")
        one.equivalent(f"{_ZERO}.zero_quantized_weights", means, "8 bits with a scale for every 256 values")
    else:
        one.honoured(f"{_ZERO}.zero_quantized_weights")
    if one.get(f"{_ZERO}.zero_quantized_gradients") and is_sharded:
        feedback = "ef14" if one.has(f"{_ZERO}.zeropp_loco_param") else "none"
        means = one.set("compress.method", "int8")
        one.set("compress.error_feedback", feedback)
        one.set("compress.warmup_steps", 0)
        one.equivalent(f"{_ZERO}.zero_quantized_gradients", means, "8 bits where ZeRO++ sends 4")
    else:
        one.honoured(f"{_ZERO}.zero_quantized_gradients")
    one.equivalent(f"{_ZERO}.zeropp_loco_param.err_beta", "compress.error_feedback = ef14", "our error feedback")
    one.hint(f"{_ZERO}.zeropp_loco_param.reset_T", "what was dropped is never thrown away")


def _small_keys(one: Translation) -> None:
    if int(one.get(f"{_ZERO}.zero_hpz_partition_size")) > 1:
        one.hint(
            f"{_ZERO}.zero_hpz_partition_size",
            "parameters are gathered from all shards in backward too; replicas of shards save that: mesh.shard",
        )
    else:
        one.honoured(f"{_ZERO}.zero_hpz_partition_size")
    if one.get(f"{_ZERO}.load_from_fp32_weights"):
        one.honoured(f"{_ZERO}.load_from_fp32_weights", "torsh migrate checkpoint", "reads the fp32 weights")
    else:
        one.hint(f"{_ZERO}.load_from_fp32_weights", "a checkpoint's fp32 weights are always the ones that are read")
    if one.get(f"{_ZERO}.ignore_unused_parameters"):
        one.honoured(f"{_ZERO}.ignore_unused_parameters", "", "parameters without a gradient are left alone")
    else:
        one.hint(f"{_ZERO}.ignore_unused_parameters", "parameters without a gradient are left alone, never an error")
    if one.has(f"{_ZERO}.zenflow"):
        one.refuse(f"{_ZERO}.zenflow", "important gradients are not updated apart from others here")
        for name in one.get(f"{_ZERO}.zenflow") or {}:
            one.refuse(f"{_ZERO}.zenflow.{name}", "important gradients are not updated apart from others here")
