"""Every key of a DeepSpeed config, of the newest version and of older ones whose files are still about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torsh_distributed.migrate.deepspeed.config import section_keys as section
from torsh_distributed.migrate.deepspeed.config.setting import (
    AUTO,
    Setting,
    SettingGroup,
    anything,
    flag,
    leaves_of,
    number,
    setting_at,
    text,
    whole,
    words,
)
from torsh_distributed.migrate.report import Verdict
from torsh_distributed.plan.problems import Problem, did_you_mean

_BUCKETS = "what travels together is a layer here, not a number of elements: see fsdp.wrap"
_LAYERS = "a layer's parameters are gathered when it runs: see fsdp.max_gathered_ahead"
_ALWAYS = "FSDP2 always works this way"
_NO_LINEAR = "torch's linear layers keep no copy of their weight"
_DEVICES = ("none", "cpu", "nvme")

OFFLOAD_OPTIMIZER = SettingGroup(
    is_checked=True,
    settings={
        "device": text("none", *_DEVICES),
        "nvme_path": text(),
        "buffer_count": whole(4).hint("the number of buffers follows the hit rate: see offload.prefetch_buffer_size"),
        "pin_memory": flag(True),
        "pipeline": flag(False).hint("the pager reads and writes in the background"),
        "pipeline_read": flag(False).hint("the pager reads in the background"),
        "pipeline_write": flag(False).hint("the pager writes in the background"),
        "fast_init": flag(False).hint("state is made where it lives"),
        "ratio": number(1.0, least=0),
        "super_offload": flag(False).hint("state on the host is updated by CpuAdam"),
        "cpuadam_cores_perc": number(0.8, least=0).hint("threads follow OMP_NUM_THREADS"),
    },
)
OFFLOAD_PARAM = SettingGroup(
    is_checked=True,
    settings={
        "device": text("none", *_DEVICES),
        "nvme_path": text(),
        "buffer_count": whole(5).hint("the number of buffers follows the hit rate: see offload.prefetch_buffer_size"),
        "buffer_size": whole(int(1e8)).hint("a buffer is as large as the layer in it"),
        "max_in_cpu": whole(int(1e9)).hint("host memory is limited in bytes: see offload.cpu_memory_budget_gb"),
        "pin_memory": flag(True),
    },
)

ZERO = SettingGroup(
    is_checked=True,
    settings={
        "stage": whole(0, choices=(0, 1, 2, 3)),
        "contiguous_gradients": flag(True).hint(_ALWAYS),
        "reduce_scatter": flag(True).hint("shards are always reduce-scattered"),
        "reduce_bucket_size": whole(int(5e8)).hint(_BUCKETS),
        "use_multi_rank_bucket_allreduce": flag(True).hint("shards are always reduce-scattered"),
        "allgather_partitions": flag(True).hint("shards are always all-gathered"),
        "allgather_bucket_size": whole(int(5e8)).hint(_BUCKETS),
        "overlap_comm": flag(None).hint("gradients always travel while backward still computes"),
        "compute_grad_norm": flag(True).hint("the norm is a by-product of clipping"),
        "load_from_fp32_weights": flag(True),
        "elastic_checkpoint": flag(False).honoured("", "checkpoints load at any world size"),
        "offload_param": OFFLOAD_PARAM,
        "offload_optimizer": OFFLOAD_OPTIMIZER,
        "zenflow": SettingGroup(settings={}, is_open=True),
        "sub_group_size": whole(int(1e9)).hint("the optimizer updates parameter by parameter"),
        "cpu_offload": flag(None),
        "cpu_offload_params": flag(None),
        "cpu_offload_param": flag(None),
        "cpu_offload_use_pin_memory": flag(None),
        "stage3_prefetch_bucket_size": whole(int(5e7)).hint(_LAYERS),
        "stage3_param_persistence_threshold": whole(int(1e5)).hint("small parameters are gathered with their layer"),
        "stage3_model_persistence_threshold": whole(2**63 - 1).hint("small parameters are gathered with their layer"),
        "stage3_max_live_parameters": whole(int(1e9)).hint(_LAYERS),
        "stage3_max_reuse_distance": whole(int(1e9)).hint(_LAYERS),
        "stage3_gather_16bit_weights_on_model_save": flag(False).honoured("engine.save", "`torsh checkpoint export`"),
        "stage3_gather_fp16_weights_on_model_save": flag(False).honoured("engine.save", "`torsh checkpoint export`"),
        "stage3_module_granularity_threshold": whole(0).hint(_LAYERS),
        "stage3_use_all_reduce_for_fetch_params": flag(False).hint("shards are always all-gathered"),
        "stage3_allgather_sequential": flag(False).hint(_LAYERS),
        "ignore_unused_parameters": flag(True),
        "legacy_stage1": flag(False).hint("there is one stage 1 here"),
        "round_robin_gradients": flag(False).hint("a rank copies its own shards only"),
        "parameter_alignment": flag(False).hint("FSDP2 pads shards itself"),
        "zero_hpz_partition_size": whole(1),
        "zero_quantized_weights": flag(False),
        "zero_quantized_nontrainable_weights": flag(False).refused(
            "frozen weights are not stored in 8 bits: quantize them with torchao or bitsandbytes"
        ),
        "zero_quantized_gradients": flag(False),
        "zeropp_loco_param": SettingGroup(is_checked=True, settings={"err_beta": number(0.8), "reset_T": whole(1024)}),
        "mics_shard_size": whole(-1, least=-1),
        "mics_hierarchical_params_gather": flag(False).hint("the backend decides how shards are gathered"),
        "memory_efficient_linear": flag(True).hint(_NO_LINEAR),
        "pipeline_loading_checkpoint": flag(False).hint("every rank reads its own part"),
        "override_module_apply": flag(True).hint("modules are built as torch builds them"),
        "log_trace_cache_warnings": flag(False).hint("there is no trace of modules to warn about"),
        "enable_sanity_checks": flag(False).equivalent("TORSH_DEBUG=1", "it compares every collective across ranks"),
        "save_muon_momentum_buffer_in_memory": flag(False).hint("offload decides by budget"),
        "leaf_module": SettingGroup(
            is_checked=True,
            settings={
                name: words().hint("a module inside a layer is gathered with the layer: see fsdp.wrap")
                for name in ("classes", "names", "name_suffixes")
            },
        ),
    },
)


_NOT_QUANTIZED = "quantization during training is not done here: see torchao, and precision.dtype = fp8"

KNOWN = SettingGroup(
    settings={
        "train_batch_size": whole(least=1),
        "train_micro_batch_size_per_gpu": whole(least=1),
        "gradient_accumulation_steps": whole(least=1),
        "managed_gradient_accumulation": flag(True),
        "optimizer": SettingGroup(
            settings={
                "type": text(),
                "params": SettingGroup(settings={}, is_open=True),
                "legacy_fusion": flag().hint("the optimizer is torch's"),
            }
        ),
        "scheduler": SettingGroup(
            settings={"type": text(), "params": SettingGroup(settings={}, is_open=True)},
        ),
        "gradient_clipping": number(1.0),
        "fp16": section.FP16,
        "bf16": section.BF16,
        "bfloat16": section.BF16,
        "amp": section.AMP,
        "torch_autocast": section.AUTOCAST,
        "data_types": section.DATA_TYPES,
        "communication_data_type": text(None, "fp16", "bf16", "fp32"),
        "seq_parallel_communication_data_type": text("fp32", "fp16", "bf16", "fp32").hint(
            "activations travel in the format they have"
        ),
        "prescale_gradients": flag().equivalent("", "the mean is the same, and sums are fp32 unless asked otherwise"),
        "gradient_predivide_factor": number(1.0).equivalent("", "the mean is the same"),
        "gradient_allreduce_op": text("mean", "mean", "sum"),
        "sparse_gradients": flag().hint("gradients of embeddings travel dense: the result is the same"),
        "zero_optimization": ZERO,
        "zero_allow_untested_optimizer": flag().honoured("", "every torch optimizer is allowed"),
        "zero_force_ds_cpu_optimizer": flag(True).equivalent("td.train.CpuAdam", "Adam on the host is CpuAdam"),
        "activation_checkpointing": section.ACTIVATIONS,
        "steps_per_print": whole(least=1),
        "wall_clock_breakdown": flag().equivalent("TORSH_EVENTS_DIR=DIR", "`torsh trace` has the times of a step"),
        "memory_breakdown": flag().equivalent("TORSH_EVENTS_DIR=DIR", "memory is sampled with every step"),
        "dump_state": flag().honoured("torsh plan show", "prints every key"),
        "log_level": text().honoured("TORSH_LOG"),
        "disable_allgather": flag().hint("shards are always all-gathered"),
        "disable_python_gc": flag().hint("Python's collector is left as it is"),
        "vocabulary_size": whole(),
        "dataloader_drop_last": flag().equivalent("DataLoader(drop_last=…)", "the loader is yours"),
        "graph_harvesting": flag().hint("", "compile.cuda_graphs"),
        "use_data_before_expert_parallelism": flag().hint("the mesh orders the ranks"),
        "tensorboard": section.TENSORBOARD,
        "wandb": section.WANDB,
        "csv_monitor": section.CSV,
        "comet": section.COMET,
        "comms_logger": section.COMMS_LOGGER,
        "flops_profiler": section.FLOPS,
        "timers": section.TIMERS,
        "elasticity": section.ELASTICITY,
        "checkpoint": section.CHECKPOINT,
        "nebula": SettingGroup(gate="enabled", settings={"enabled": flag()}, is_open=True),
        "datastates_ckpt": anything(),
        "aio": section.AIO,
        "pipeline": section.PIPELINE,
        "tensor_parallel": section.TENSOR,
        "expert_parallel": section.EXPERT,
        "sequence_parallel_size": whole(1, least=1),
        "data_parallel_size": whole(least=1),
        "compile": section.COMPILE,
        "hybrid_engine": section.HYBRID,
        "autotuning": section.AUTOTUNING,
        "data_efficiency": section.DATA_EFFICIENCY,
        "curriculum_learning": section.CURRICULUM,
        "progressive_layer_drop": section.LAYER_DROP,
        "compression_training": section.COMPRESSION_TRAINING,
        "quantize_training": SettingGroup(
            gate="enabled", settings={"enabled": flag().refused(_NOT_QUANTIZED)}, is_open=True
        ),
        "eigenvalue": section.EIGENVALUE,
        "weight_quantization": anything().refused("weights are not quantized for inference here: see torchao"),
        "sparse_attention": anything().refused("write the pattern as a mask of torch's FlexAttention"),
    }
)
"""The keys of the whole file."""


FILLED_BY: Mapping[str, str] = {
    "train_batch_size": "micro-batch × accumulation × ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm, or 1.0",
    "fp16.enabled": "fp16, or mixed_precision",
    "bf16.enabled": "bf16, or mixed_precision",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "[adam_beta1, adam_beta2]",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
"""Which argument of HF's trainer fills a key."""


def fill(values: dict[str, Any], fills: Mapping[str, Any]) -> list[Problem]:
    """Put `fills`, by key in full, in place of "auto"; the problems that are left. Changes `values`.

    What only tunes a mechanism that works in another way here needs no fill: its "auto" is a hint like any value.
    """
    found: list[Problem] = []
    autos = dict(_autos(values))
    for key, value in fills.items():
        if key not in autos:
            hint = did_you_mean(key, autos) or f'"auto" stands in: {", ".join(autos) or "none"}'
            found.append(Problem(key, f'a fill is given for {key}, which is not "auto" in the config', hint))
            continue
        _put(values, key, value)
    for key, setting in autos.items():
        if key in fills or (setting is not None and setting.verdict is Verdict.HINT):
            continue
        source = FILLED_BY.get(key)
        filled = f" from {source}" if source else ""
        found.append(
            Problem(key, f'{key} is "auto", which a trainer fills{filled}', f"write a number, or give a fill for {key}")
        )
    return found


def _autos(values: Mapping[str, Any]) -> Iterator[tuple[str, Setting | None]]:
    for key, value in leaves_of(values, KNOWN):
        setting = setting_at(key, KNOWN)
        if not isinstance(setting, Setting):
            for inner, inside in _deep(key, value):
                if inside == AUTO:
                    yield inner, None
        elif value == AUTO and not setting.is_own_auto:
            yield key, setting


def _deep(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _deep(f"{key}.{name}", inside)
    else:
        yield key, value


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    place = values
    for one in sections:
        place = place[one]
    place[name] = value
