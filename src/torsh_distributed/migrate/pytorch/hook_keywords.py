"""DDP's communication hooks as compression of a plan; GradScaler, the old Pipe and process groups as keys of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torsh_distributed.migrate.plan_draft import PlanDraft, Reader, refused, same_by, stays, to_key, tuning
from torsh_distributed.migrate.pytorch.fsdp_keywords import format_of, parts_of, word


def _bucket_size(draft: PlanDraft, key: str, value: Any) -> None:
    if value is None:
        draft.match(key, value, "ddp.max_bucket_size_mb = 25", "the default is the same")
        return
    size_mb = float(value)
    if size_mb < 1:
        draft.put("ddp.min_bucket_size_mb", size_mb)
    draft.honour(key, value, "ddp.max_bucket_size_mb", size_mb)


def _bucket_sizes(draft: PlanDraft, key: str, value: Any) -> None:
    if not value or len(value) > 2:
        draft.refuse(key, value, "a plan has the size of the first bucket and that of all others")
        return
    draft.put("ddp.min_bucket_size_mb", float(value[0]))
    draft.honour(key, value, "ddp.max_bucket_size_mb", float(value[-1]), "the first is ddp.min_bucket_size_mb")


def _mixed_precision(draft: PlanDraft, key: str, value: Any) -> None:
    if value is None:
        draft.match(key, value, "", "fp32 is the default")
        return
    for name, part in parts_of(value).items():
        target = {"param_dtype": "dtype", "reduce_dtype": "reduce_dtype", "buffer_dtype": "buffer_dtype"}.get(name)
        chosen = format_of(part)
        if target is None or part is None:
            continue
        if chosen is None:
            draft.refuse(f"{key}.{name}", part, "formats are fp32, bf16 and fp16")
        else:
            draft.honour(f"{key}.{name}", part, f"precision.{target}", chosen)


def _dim(draft: PlanDraft, key: str, value: Any) -> None:
    if value == 0:
        draft.match(key, value, "", "batches are cut along dim 0")
    else:
        draft.refuse(key, value, "batches are cut along dim 0: transpose the inputs")


def _view(draft: PlanDraft, key: str, value: Any) -> None:
    draft.honour(key, value, "ddp.gradient_as_bucket_view", bool(value), "the default here is true")


DDP_KEYWORDS: dict[str, Reader] = {
    "device_ids": same_by("td.device()", "each rank uses the device of its local rank"),
    "output_device": same_by("td.device()", "each rank uses the device of its local rank"),
    "dim": _dim,
    "broadcast_buffers": to_key("ddp.broadcast_buffers", lambda value: value is None or bool(value)),
    "forward_sync_buffers": to_key("ddp.broadcast_buffers", lambda value: value is None or bool(value)),
    "init_sync": refused("all ranks begin with the parameters of rank 0; leave it out", unless=(None, True)),
    "process_group": stays("group= of td.DistributedDataParallel, or mesh.dp of a plan"),
    "device_mesh": stays("[mesh] of a plan"),
    "bucket_cap_mb": _bucket_size,
    "bucket_cap_mb_list": _bucket_sizes,
    "find_unused_parameters": to_key("ddp.find_unused_parameters", bool),
    "check_reduction": tuning("torch ignores it too"),
    "gradient_as_bucket_view": _view,
    "static_graph": to_key("ddp.static_graph", bool),
    "delay_all_reduce_named_params": refused("gradients are averaged in buckets as they come; leave it out"),
    "param_to_hook_all_reduce": refused("gradients are averaged in buckets as they come; leave it out"),
    "mixed_precision": _mixed_precision,
    "skip_all_reduce_unused_params": tuning("unused parameters are found under ddp.find_unused_parameters"),
    "batched_grad_copy": tuning("gradients are views into their buckets: nothing is copied"),
}
"""Every keyword of torch 2.13's class."""


def _plain(method: str) -> Reader:
    """A hook that encodes every gradient from the first step, without feedback."""

    def read(draft: PlanDraft, key: str, value: Any) -> None:
        draft.put("compress.error_feedback", "none")
        draft.put("compress.warmup_steps", 0)
        draft.honour(key, value, "compress.method", method)

    return read


HOOKS: dict[str, Reader] = {
    "allreduce_hook": same_by("", "gradients are averaged without a hook"),
    "fp16_compress_hook": _plain("fp16"),
    "bf16_compress_hook": _plain("bf16"),
    "quantization_pertensor_hook": _plain("nbit:8"),
    "quantization_perchannel_hook": _plain("int8"),
    "fp16_compress_wrapper": tuning("the factors of powersgd are small already"),
    "bf16_compress_wrapper": tuning("the factors of powersgd are small already"),
    "post_localSGD_hook": refused("gradients are averaged at every step; compress.period saves more on slow links"),
    "hook_with_zero_step": refused('set fsdp.strategy = "shard_optimizer" and mesh.shard: ZeRO-1 without a hook'),
    "hook_with_zero_step_interleaved": refused('set fsdp.strategy = "shard_optimizer" and mesh.shard'),
    "noop_hook": refused("it is for debugging: gradients of ranks drift apart"),
}
"""Every hook that torch 2.13 has, by its name, beside PowerSGD's."""
_POWERSGD = ("powerSGD_hook", "batched_powerSGD_hook")

_ENUM = {
    "ALLREDUCE": "allreduce_hook",
    "FP16_COMPRESS": "fp16_compress_hook",
    "BF16_COMPRESS": "bf16_compress_hook",
    "QUANTIZE_PER_TENSOR": "quantization_pertensor_hook",
    "QUANTIZE_PER_CHANNEL": "quantization_perchannel_hook",
    "POWER_SGD": "powerSGD_hook",
    "POWER_SGD_RANK2": "powerSGD_hook",
    "BATCHED_POWER_SGD": "batched_powerSGD_hook",
    "BATCHED_POWER_SGD_RANK2": "batched_powerSGD_hook",
    "NOOP": "noop_hook",
}


def read_comm_hook(draft: PlanDraft, values: Mapping[str, Any]) -> None:
    """`hook`: a function of torch's, its name, or a DDPCommHookType; `state`: PowerSGDState's arguments."""
    state = dict(values.get("state") or {})
    wrapper = values.get("wrapper")
    for name in values:
        if name not in ("hook", "state", "wrapper"):
            draft.unknown(f"comm_hook.{name}", ["hook", "state", "wrapper"])
    given = word(values.get("hook", ""))
    hook = _ENUM.get(given, given)
    if hook in _POWERSGD:
        rank = state.pop("matrix_approximation_rank", 2 if given.endswith("RANK2") else 1)
        draft.honour(
            "comm_hook.hook", given, "compress.method", f"powersgd:{rank}", "of matrices as the model has them"
        )
        draft.read({"start_powerSGD_iter": 1000, **state}, _POWERSGD_STATE, "comm_hook.state.")
    elif hook in HOOKS:
        HOOKS[hook](draft, "comm_hook.hook", given)
        draft.read(state, {"process_group": stays("mesh.dp of a plan")}, "comm_hook.state.")
    else:
        known = ", ".join((*HOOKS, *_POWERSGD))
        draft.problem("comm_hook.hook", f"comm_hook.hook is {given or 'missing'}", f"known: {known}")
    if wrapper is not None:
        HOOKS.get(word(wrapper), refused("wrappers are fp16_compress_wrapper and bf16_compress_wrapper"))(
            draft, "comm_hook.wrapper", word(wrapper)
        )


_POWERSGD_STATE: dict[str, Reader] = {
    "process_group": stays("mesh.dp of a plan"),
    "start_powerSGD_iter": to_key("compress.warmup_steps"),
    "min_compression_rate": tuning("tensors that the factors would not shrink are sent whole"),
    "use_error_feedback": to_key("compress.error_feedback", lambda value: "ef14" if value else "none"),
    "warm_start": same_by("", "factors begin with those of the last step"),
    "orthogonalization_epsilon": tuning("factors are made orthogonal in a stable way"),
    "random_seed": to_key("training.seed"),
    "compression_stats_logging_frequency": tuning("compression statistics are events"),
    "batch_tensors_with_same_shape": tuning("tensors are packed by size"),
}


def _growth(expected: float, what: str) -> Reader:
    def read(draft: PlanDraft, key: str, value: Any) -> None:
        if float(value) == expected:
            draft.match(key, value, "", f"the loss scale {what}")
        else:
            draft.refuse(key, value, f"the loss scale {what}; leave it out")

    return read


def _scaler_enabled(draft: PlanDraft, key: str, value: Any) -> None:
    if value:
        draft.honour(key, value, "precision.dtype", "fp16", "fp16 comes with loss scaling")
    else:
        draft.match(key, value, "", "only fp16 is scaled")


SCALER_KEYWORDS: dict[str, Reader] = {
    "device": same_by("td.device()", "the scaler works where the gradients are"),
    "enabled": _scaler_enabled,
    "init_scale": to_key("precision.init_loss_scale", float),
    "growth_factor": _growth(2.0, "doubles"),
    "backoff_factor": _growth(0.5, "halves"),
    "growth_interval": to_key("precision.loss_scale_growth_interval"),
}
"""Every keyword of torch.amp.GradScaler."""


def _recomputes(draft: PlanDraft, key: str, value: Any) -> None:
    if value == "never":
        draft.match(key, value, "", "activations are kept unless asked for")
        return
    draft.put("activation.every_n_layers", 1)
    reason = "" if value == "always" else "the last microbatch is recomputed too"
    draft.honour(key, value, "activation.strategy", "uniform", reason)


PIPE_KEYWORDS: dict[str, Reader] = {
    "chunks": to_key("pipeline.num_microbatches"),
    "checkpoint": _recomputes,
    "deferred_batch_norm": refused("normalise by layer or group"),
    "balance": refused('set pipeline.balance = "manual" and name the first module of each stage in split_points'),
    "devices": to_key("mesh.pp", len, "one rank for each device"),
    "stages": to_key("mesh.pp"),
}
"""Keywords of torch.distributed.pipeline.sync.Pipe, which torch no longer has; `stages`: the devices of its layers."""


def _backend(draft: PlanDraft, key: str, value: Any) -> None:
    known = {"mpi": "mpi4py", None: "auto", "": "auto"}
    draft.honour(key, value, "distributed.backend", known.get(value, value))


def _timeout(draft: PlanDraft, key: str, value: Any) -> None:
    if value is None:
        draft.hint(key, value, "the default is 300 s here", "distributed.timeout_s = 300")
        return
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    draft.honour(key, value, "distributed.timeout_s", seconds)


GROUP_KEYWORDS: dict[str, Reader] = {
    "backend": _backend,
    "init_method": same_by("td.init()", "ranks meet through the launcher"),
    "timeout": _timeout,
    "world_size": same_by("torsh run --nproc-per-node", "the launcher says it"),
    "rank": same_by("torsh run", "the launcher says it"),
    "store": refused("use td.init(), or torch's own init_process_group, which works as before"),
    "group_name": tuning("torch ignores it too"),
    "pg_options": refused("options of NCCL are variables: NCCL_…"),
    "device_id": same_by("td.device()", "each rank uses the device of its local rank"),
}
"""Every keyword of torch.distributed.init_process_group."""
