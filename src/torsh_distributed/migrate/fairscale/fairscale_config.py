"""Settings for FairScale as one dict or JSON file: a plan, with a verdict on every key. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torsh_distributed.migrate.plan_draft import (
    ForeignConfig,
    PlanDraft,
    Reader,
    by_table,
    for_world,
    in_host_memory,
    optimizer_in_host_memory,
    refused,
    same_by,
    stays,
    to_key,
    tuning,
)
from torsh_distributed.migrate.report import MigrationReport
from torsh_distributed.plan.plan import Plan
from torsh_distributed.plan.sections.data import FsdpConfig
from torsh_distributed.plan.sections.mesh import PipelineConfig

_FORMATS = {"FLOAT32": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16", "FP32": "fp32", "FP16": "fp16", "BF16": "bf16"}
_HALF = "set precision.dtype = fp16 by fsdp.mixed_precision: the scaler works on float16"


def _mixed(draft: PlanDraft, key: str, value: Any) -> None:
    if value and draft.get("precision.dtype") in (None, "fp32"):
        draft.honour(
            key, value, "precision.dtype", "fp16", "FairScale computes in float16 unless compute_dtype differs"
        )
    elif value:
        draft.accept(key, value, f"precision.dtype = {draft.get('precision.dtype')}")
    else:
        draft.match(key, value, "", "fp32 is the default")


def _policy(draft: PlanDraft, key: str, value: Any) -> None:
    word = str(value).upper()
    if word == "CUSTOM_FUNCTION":
        draft.refuse(key, value, "name classes in fsdp.wrap_classes, or pass wrap_fn to td.FullyShardedDataParallel")
        return
    if word == "SIZE_BASED" and draft.get("fsdp.wrap_min_params") is None:
        draft.put("fsdp.wrap_min_params", 100_000)
    by_table("fsdp.wrap", {"NONE": "none", "SIZE_BASED": "size", "TRANSFORMER_BASED": "auto"})(draft, key, value)


def _reshard(draft: PlanDraft, key: str, value: Any) -> None:
    draft.honour(key, value, "fsdp.strategy", "full_shard" if value else "shard_grad_op")


def _wrapper(draft: PlanDraft, key: str, value: Any) -> None:
    if str(value).rpartition(".")[2] in ("FullyShardedDataParallel", "FSDP"):
        draft.match(key, value, "td.FullyShardedDataParallel", "FSDP2 underneath")
    else:
        draft.refuse(key, value, "pieces are wrapped by FSDP2; leave it out")


def _offloaded(draft: PlanDraft, key: str, value: Any) -> None:
    if value:
        in_host_memory(draft, key, value)
    else:
        draft.match(key, value, "", "nothing is offloaded unless asked for")


def _offloaded_state(draft: PlanDraft, key: str, value: Any) -> None:
    if value:
        optimizer_in_host_memory(draft, key, value)
    else:
        draft.match(key, value, "", "nothing is offloaded unless asked for")


def _neutral_factor(draft: PlanDraft, key: str, value: Any) -> None:
    if float(value) == 1.0:
        draft.match(key, value, "", "gradients are means over ranks")
    else:
        draft.refuse(key, value, "gradients are means over ranks; scale the loss instead")


def _growth(expected: float, what: str) -> Reader:
    def read(draft: PlanDraft, key: str, value: Any) -> None:
        if float(value) == expected:
            draft.match(key, value, "", f"the loss scale {what}")
        else:
            draft.refuse(key, value, f"the loss scale {what}; leave it out")

    return read


def _scaler_enabled(draft: PlanDraft, key: str, value: Any) -> None:
    if draft.get("precision.dtype") == "fp16":
        if value:
            draft.match(key, value, "precision.dtype = fp16", "fp16 comes with loss scaling")
        else:
            draft.refuse(key, value, "fp16 without loss scaling loses small gradients; use bf16")
    else:
        draft.match(key, value, "", _HALF if value else "only fp16 is scaled")


def _compresses(draft: PlanDraft, key: str, value: Any) -> None:
    if value:
        draft.honour(key, value, "compress.method", "fp16", "FairScale sends gradients as float16; other codecs too")
    else:
        draft.match(key, value, "", "gradients travel in their own format unless asked for")


def _ratio(draft: PlanDraft, key: str, value: Any) -> None:
    if not 0 < float(value) <= 1:
        draft.problem(key, f"{key} is {value}", "a share of the layers, above 0 and at most 1")
    elif draft.get("activation.every_n_layers") is not None:
        draft.hint(key, value, "every_n_layers says which layers")
    else:
        every = max(1, round(1 / float(value)))
        draft.honour(key, value, "activation.every_n_layers", every, "every n-th layer is that share")


def _schedule(draft: PlanDraft, key: str, value: Any) -> None:
    names = {"GPIPE": "gpipe", "ONE_F1B": "one_f_one_b", "INTERLEAVED": "interleaved_one_f_one_b"}
    if str(value).upper() == "INTERLEAVED":
        draft.put("pipeline.stages_per_rank", 2)
    by_table("pipeline.schedule", names)(draft, key, value)


def _balance(draft: PlanDraft, key: str, value: Any) -> None:
    if isinstance(value, list) or str(value).upper() == "MANUAL":
        draft.refuse(
            key, value, 'set pipeline.balance = "manual", and name the first module of each stage in split_points'
        )
        return
    by_table("pipeline.balance", {"AUTO": "auto", "PARAMETERS": "parameters", "TIME": "time"})(draft, key, value)


def _checkpoints(draft: PlanDraft, key: str, value: Any) -> None:
    if value and value != "never":
        draft.put("activation.every_n_layers", 1)
        draft.honour(key, value, "activation.strategy", "uniform")
    else:
        draft.match(key, value, "", "activations are kept unless asked for")


def _bucket_numel(draft: PlanDraft, key: str, value: Any) -> None:
    size_mb = max(1.0, float(value) * 4 / 2**20)
    draft.honour(key, value, "ddp.max_bucket_size_mb", size_mb, "so many elements of 4 bytes")


def _partition(draft: PlanDraft, key: str, value: Any) -> None:
    if value:
        draft.honour(key, value, "fsdp.strategy", "shard_optimizer")
    else:
        draft.put("mesh.shard", 1)
        draft.put("mesh.dp", -1)
        draft.accept(key, value, "mesh.dp = -1", "every rank keeps the whole optimizer state")


SECTIONS: dict[str, dict[str, Reader]] = {
    "fsdp": {
        "compute_dtype": by_table("precision.dtype", _FORMATS),
        "mixed_precision": _mixed,
        "buffer_dtype": by_table("precision.buffer_dtype", _FORMATS),
        "min_num_params": to_key("fsdp.wrap_min_params"),
        "auto_wrap_policy": _policy,
        "wrapper_cls": _wrapper,
        "flatten_parameters": same_by("", "FSDP2 shards each parameter by rows and sends a piece as one"),
        "bucket_cap_mb": tuning("FSDP2 sends the gradients of a piece as one; its size is that of fsdp.wrap"),
        "reshard_after_forward": _reshard,
        "move_params_to_cpu": _offloaded,
        "cpu_offload": _offloaded,
        "move_grads_to_cpu": _offloaded,
        "fp32_reduce_scatter": to_key("precision.reduce_dtype", lambda value: "fp32" if value else "same"),
        "force_input_to_fp32": refused("name modules that stay in fp32 in fsdp.ignored_modules"),
        "gradient_predivide_factor": same_by("", "gradients are means either way; FSDP2 divides in two parts"),
        "clear_autocast_cache": tuning("FSDP2 casts parameters itself; no cast of them is cached"),
        "state_dict_device": stays("engine.save", "checkpoints are written from host memory"),
        "verbose": tuning("TORSH_LOG=debug shows more"),
    },
    "oss": {
        "optimizer": stays("the optimizer that td.parallelize gets", "build it as for one process"),
        "partition_optimizer": _partition,
        "broadcast_buffers": to_key("ddp.broadcast_buffers", bool),
        "broadcast_fp16": refused("parameters travel exactly; leave it out"),
        "compress_gradients": _compresses,
        "reduce_fp16": _compresses,
        "gradient_predivide_factor": _neutral_factor,
        "gradient_postdivide_factor": _neutral_factor,
        "reduce_buffer_size": _bucket_numel,
    },
    "sharded_grad_scaler": {
        "init_scale": to_key("precision.init_loss_scale", float),
        "growth_factor": _growth(2.0, "doubles"),
        "backoff_factor": _growth(0.5, "halves"),
        "growth_interval": to_key("precision.loss_scale_growth_interval"),
        "enabled": _scaler_enabled,
    },
    "activation_checkpointing": {
        "strategy": by_table(
            "activation.strategy",
            {"NONE": "none", "UNIFORM": "uniform", "SELECTIVE": "selective", "ADAPTIVE": "by_size"},
        ),
        "every_n_layers": to_key("activation.every_n_layers"),
        "ratio": _ratio,
        "offload_to_cpu": to_key("activation.offload_to_cpu", bool),
    },
    "pipeline": {
        "stages": to_key("mesh.pp"),
        "chunks": to_key("pipeline.num_microbatches", reason="FairScale's chunks are a count"),
        "micro_batch_size": refused("a count is needed: give batch_size beside it, or write chunks"),
        "balance": _balance,
        "schedule": _schedule,
        "checkpoint_activation": _checkpoints,
        "checkpoint": _checkpoints,
        "backend": to_key("distributed.backend"),
    },
    "memory": {
        "cpu_offloading": _offloaded_state,
        "parameter_offloading": _offloaded,
        "optimizer_offloading": _offloaded_state,
        "gradient_compression": _compresses,
        "memory_defragmentation": refused("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        "lazy_parameter_init": same_by("", "build the model under torch.device('meta'): each piece is filled in turn"),
    },
}
"""Every section with its keys, and what becomes of each; keys that others depend on come first."""


class FairScaleConfig(ForeignConfig):
    """One dict for FairScale's parts: fsdp, oss, sharded_grad_scaler, activation_checkpointing, pipeline, memory.

    `batch_size` is a replica's batch: with it a pipeline's micro_batch_size, which is a size, becomes a plan's number
    of microbatches.
    """

    @classmethod
    def default(cls) -> Self:
        """Fully sharded in float32, with FairScale's defaults."""
        return cls({"fsdp": {"auto_wrap_policy": "SIZE_BASED", "reshard_after_forward": True}})

    @classmethod
    def fsdp_mixed_precision(cls) -> Self:
        """Fully sharded in float16, with a scaler."""
        return cls({"fsdp": {"mixed_precision": True}, "sharded_grad_scaler": {"enabled": True, "init_scale": 2.0**16}})

    @classmethod
    def pipelined(cls, stages: int, chunks: int) -> Self:
        """A pipeline of so many stages and microbatches, in GPipe's schedule, with recomputed activations."""
        return cls({"pipeline": {"stages": stages, "chunks": chunks, "schedule": "GPIPE", "checkpoint": "always"}})

    def to_plan(self) -> tuple[Plan, MigrationReport]:
        """A plan, and the verdict on every key. Raises ConfigurationError for unknown keys and values."""
        draft = PlanDraft("fairscale")
        values = dict(self.values)
        batch_size = values.pop("batch_size", None)
        if batch_size is not None:
            self._count_microbatches(draft, values, batch_size)
        is_sharded = bool(values.keys() & {"fsdp", "oss"})
        if is_sharded:
            draft.put("mesh.dp", 1)
            draft.put("mesh.shard", -1)
        if "oss" in values and "fsdp" not in values:
            draft.put("fsdp.strategy", "shard_optimizer")
        for name, table in SECTIONS.items():
            given = values.pop(name, None)
            if isinstance(given, Mapping):
                order = {key: given[key] for key in table if key in given}
                draft.read({**order, **given}, table, f"{name}.")
            elif given is not None:
                draft.problem(name, f"{name} is a table of keys", f"it has: {', '.join(table)}")
        for name in values:
            draft.unknown(name, ["batch_size", *SECTIONS])
        return draft.finish()

    def _count_microbatches(self, draft: PlanDraft, values: dict[str, Any], batch_size: Any) -> None:
        draft.accept("batch_size", batch_size, "a replica's samples in one step")
        pipeline = values.get("pipeline")
        if not isinstance(pipeline, Mapping) or "micro_batch_size" not in pipeline:
            return
        size = pipeline["micro_batch_size"]
        values["pipeline"] = {key: value for key, value in pipeline.items() if key != "micro_batch_size"}
        if not isinstance(size, int) or not isinstance(batch_size, int) or size < 1 or batch_size % size:
            draft.problem(
                "pipeline.micro_batch_size",
                f"batch_size {batch_size} is not a multiple of pipeline.micro_batch_size {size}",
                "give a size that divides the batch",
            )
            return
        draft.honour(
            "pipeline.micro_batch_size",
            size,
            "pipeline.num_microbatches",
            batch_size // size,
            f"a plan counts them: {batch_size} / {size}",
        )

    def to_fsdp_config(self) -> FsdpConfig:
        """The `[fsdp]` of the plan."""
        return self.to_plan()[0].fsdp

    def to_pipeline_config(self) -> PipelineConfig:
        """The `[pipeline]` of the plan."""
        return self.to_plan()[0].pipeline


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether a parsed file is of this kind, by the names at its top."""
    return bool({"fsdp", "oss", "sharded_grad_scaler"} & document.keys()) and not document.keys() - {
        *SECTIONS,
        "batch_size",
    }


def translate(path: Path, **options: Any) -> tuple[Plan, MigrationReport]:
    """The plan of the file, and the report on it, for `torsh migrate FILE`."""
    return for_world(FairScaleConfig.from_file(path).to_plan(), **options)
