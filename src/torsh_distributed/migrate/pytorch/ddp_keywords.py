"""Keywords of torch's DistributedDataParallel, as keys of a plan."""

from __future__ import annotations

from typing import Any

from torsh_distributed.migrate.plan_draft import PlanDraft, Reader, refused, same_by, stays, to_key, tuning
from torsh_distributed.migrate.pytorch.torch_words import format_of, parts_of


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
