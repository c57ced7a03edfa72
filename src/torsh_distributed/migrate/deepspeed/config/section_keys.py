"""The keys of all sections but `zero_optimization`, with the verdicts that do not depend on others."""

from __future__ import annotations

from dataclasses import replace

from torsh_distributed.migrate.deepspeed.config.setting import (
    AUTO,
    Setting,
    SettingGroup,
    anything,
    flag,
    number,
    text,
    whole,
    words,
)
from torsh_distributed.migrate.report import Verdict

_SAYS_SCALER = "the plan's scaler works without; `torsh run --as deepspeed` keeps DeepSpeed's rule"
_DTYPES = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "half", "float", "torch.float32")
DTYPES = (*_DTYPES, "torch.float16", "torch.bfloat16")
"""The spellings of number formats."""


def _own_auto(setting: Setting) -> Setting:
    return replace(setting, default=AUTO, is_own_auto=True)


def _all_refused(reason: str, **settings: Setting) -> SettingGroup:
    """A section that is refused as a whole once it is enabled: its `enabled` carries the reason."""
    others = {name: setting.hint("it belongs to what is refused") for name, setting in settings.items()}
    return SettingGroup(settings={"enabled": flag().refused(reason), **others}, gate="enabled", is_open=True)


FP16 = SettingGroup(
    is_checked=True,
    gate="enabled",
    settings={
        "enabled": flag(),
        "auto_cast": flag().equivalent("", "inputs are cast where they meet 16-bit weights"),
        "loss_scale": number(0, least=0),
        "initial_scale_power": whole(16),
        "loss_scale_window": whole(1000, least=1),
        "hysteresis": whole(2, least=1).hint(_SAYS_SCALER),
        "consecutive_hysteresis": flag().hint(_SAYS_SCALER),
        "min_loss_scale": number(1, least=0).hint(_SAYS_SCALER),
        "fp16_master_weights_and_grads": flag().refused("weights and optimizer state stay in fp32"),
        "fp16_opt_level": text().hint("DeepSpeed does not read it either"),
    },
)
BF16 = SettingGroup(
    is_checked=True,
    gate="enabled",
    settings={
        "enabled": flag(),
        "immediate_grad_update": flag().hint("gradients are fp32 shards at once"),
        "check_grad_overflow": flag(True).equivalent(
            "", 'a gradient that is not finite raises; recovery.divergence = "roll_back" goes on'
        ),
        "bf16_master_weights_and_grads": flag().refused("weights and optimizer state stay in fp32"),
        "bf16_optimizer_states": flag().refused("weights and optimizer state stay in fp32"),
        "loss_scale": number().hint("bf16 needs no loss scale; DeepSpeed does not read it either"),
        "initial_scale_power": whole().hint("bf16 needs no loss scale; DeepSpeed does not read it either"),
    },
)
AMP = SettingGroup(gate="enabled", settings={"enabled": flag(), "opt_level": text("O1")}, is_open=True)
AUTOCAST = SettingGroup(
    gate="enabled",
    settings={
        "enabled": flag(),
        "dtype": text("bfloat16", *DTYPES),
        "lower_precision_safe_modules": words().hint("autocast decides by operation, not by module"),
    },
)
DATA_TYPES = SettingGroup(
    settings={
        "grad_accum_dtype": text(None, *DTYPES),
        "param_dtype": text(None, *DTYPES).hint("fp16.enabled and bf16.enabled say it"),
        "buffer_dtype": text(None, *DTYPES),
        "keep_in_fp32_modules": _own_auto(anything()).equivalent("", "parameters are fp32 throughout"),
    }
)
ACTIVATIONS = SettingGroup(
    settings={
        "partition_activations": flag().hint("activations are recomputed or moved to the host, not split"),
        "cpu_checkpointing": flag(),
        "contiguous_memory_optimization": flag().hint("torch's allocator keeps blocks of equal size"),
        "number_checkpoints": whole().hint("layers are chosen by [activation]"),
        "synchronize_checkpoint_boundary": flag().hint("streams are synchronised by torch"),
        "profile": flag().hint("`torsh trace` has the times"),
    }
)
CHECKPOINT = SettingGroup(
    settings={
        "tag_validation": text("warn", "warn", "ignore", "fail").honoured("", "ranks always agree on what they save"),
        "load_universal": flag().honoured("torsh migrate checkpoint", "universal checkpoints are read like others"),
        "use_node_local_storage": flag(),
        "checkpoint_serialization": flag(True).hint("tensors are written as they are, without pickle"),
        "parallel_write": SettingGroup(
            settings={"pipeline_stage": flag().hint("every rank writes its own part in parallel")}
        ),
        "writer": SettingGroup(
            settings={
                "type": text("fast").hint("there is one writer"),
                "decoupled": flag(),
                "io_buffer_size": whole().hint("the writer chooses its buffers"),
                "io_buffer_double": flag(True).hint("the writer chooses its buffers"),
                "show_statistics": flag().hint("bytes and seconds are events"),
                "data_parallel": anything().hint("every rank writes its own part in parallel"),
                "io_multiplier": whole().hint("the writer chooses its threads"),
            }
        ),
    }
)
AIO = SettingGroup(
    settings={
        name: setting.hint("offload to disk maps files into memory: no library for asynchronous I/O is used")
        for name, setting in {
            "block_size": whole(1048576),
            "queue_depth": whole(8),
            "thread_count": whole(1),
            "intra_op_parallelism": whole(1),
            "single_submit": flag(),
            "overlap_events": flag(True),
            "use_gds": flag(),
        }.items()
    }
)
PIPELINE = SettingGroup(
    settings={
        "stages": _own_auto(whole()),
        "partition": text("best"),
        "seed_layers": flag().hint("layers are initialised as the model initialises them"),
        "activation_checkpoint_interval": whole(0),
        "pipe_partitioned": flag(True).hint("activations travel whole between stages"),
        "grad_partitioned": flag(True).hint("gradients travel whole between stages"),
        "use_reentrant": flag(True).hint("torch's checkpoint without re-entry is used"),
    }
)
_LAYER_RULES = "layers are split as the model declares, or as found: write others into tensor.overrides"
TENSOR = SettingGroup(
    is_checked=True,
    settings={
        "autotp_size": whole(0),
        "tp": SettingGroup(
            settings={
                "tp_size": whole(1),
                "tp_grain_size": whole(1).hint("sizes that do not divide are refused, not rounded"),
                "mpu": anything().refused("the mesh makes the groups: give mesh.tp"),
                "tp_group": anything().refused("the mesh makes the groups: give mesh.tp"),
            }
        ),
        "preset_model": text().hint(_LAYER_RULES),
        "partition_config": anything().refused(_LAYER_RULES),
        "tp_overlap_comm": flag().hint("tensor.sequence_parallel is what saves time here"),
        "dtype": anything().hint("precision.dtype says it"),
        "vocab_parallel_lm_head": flag(None).equivalent("tensor.loss_parallel", "off unless the plan asks for it"),
        "vocab_parallel_ce_backend": text("torch").hint("training.fused_loss is the kernel here"),
        "injection_policy_tuple": anything().refused(_LAYER_RULES),
        "keep_module_on_host": flag().hint("weights are read by the ranks that need them"),
        "replace_with_kernel_inject": flag().hint("torch's kernels, and those of compile.enabled"),
    },
)
_EXPERT_NAMES = (
    "validate_folding_routing",
    "async_split_plan",
    "preset_model",
    "moe_layer_pattern",
    "expert_pattern",
    "router_pattern",
    "use_grouped_mm",
    "disable_triton_grouped_mm",
    "route_norm",
    "route_scale",
    "score_apply",
    "combine_impl",
    "row_weighting_impl",
    "gate_up_impl",
    "comm_backend",
    "comm_num_sm",
    "comm_qp_margin",
    "comm_max_tokens_per_rank",
    "num_expert_groups",
    "num_limited_groups",
    "score_func",
    "top_k",
    "load_balance_coeff",
    "routed_scaling_factor",
    "expert_w1",
    "expert_w2",
    "expert_w3",
    "num_experts_attr",
    "top_k_attr",
    "has_shared_experts",
    "shared_experts_pattern",
    "shared_experts_gate_pattern",
    "expert_activation",
)
EXPERT = SettingGroup(
    gate="enabled",
    settings={
        "enabled": flag(),
        "autoep_size": whole(1),
        "expert_tensor_parallel_size": whole(1),
        **{
            name: anything().hint("read from the model, or chosen by the dispatcher: see [expert]")
            for name in _EXPERT_NAMES
        },
    },
)
_COMPILE_NAMES = (
    "autoep_non_moe",
    "free_activation",
    "free_activation_threshold",
    "offload_activation",
    "offload_activation_pin_memory",
    "offload_opt_states",
    "offload_parameters",
    "double_buffer",
    "symmetric_memory",
    "debug_log",
    "sync_before_reduce",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_after_allgather",
    "keep_int_input_tensors",
    "keep_all_input_tensors",
    "passes",
)
COMPILE = SettingGroup(
    is_checked=True,
    gate="deepcompile",
    settings={
        "deepcompile": flag(),
        **{name: anything().hint("torch.compile decides: see [compile]") for name in _COMPILE_NAMES},
        "enabled": flag().hint("an old name: engine.compile() of DeepSpeed is compile.enabled here"),
        "backend": text().hint("torch.compile's own backend is used"),
        "kwargs": anything().hint("torch.compile decides: see [compile]"),
    },
)
TENSORBOARD = SettingGroup(
    is_checked=True,
    gate="enabled",
    settings={"enabled": flag(), "output_path": text(""), "job_name": text("DeepSpeedJobName")},
)
CSV = TENSORBOARD
WANDB = SettingGroup(
    is_checked=True,
    gate="enabled",
    settings={
        "enabled": flag(),
        "group": text().equivalent("WANDB_RUN_GROUP", "wandb reads this variable"),
        "team": text().equivalent("WANDB_ENTITY", "wandb reads this variable"),
        "project": text("deepspeed"),
    },
)
COMET = _all_refused(
    "there is no exporter for Comet: observe.exports takes otlp, tensorboard, wandb, mlflow and others",
    samples_log_interval=whole(100),
    project=text(),
    workspace=text(),
    api_key=text(),
    experiment_name=text(),
    experiment_key=text(),
    online=flag(None),
    mode=text(),
)
_EVENTS = Setting(kind="flag", default=False, verdict=Verdict.EQUIVALENT, means="TORSH_EVENTS_DIR=DIR")
COMMS_LOGGER = SettingGroup(
    is_checked=True,
    gate="enabled",
    settings={
        "enabled": replace(_EVENTS, reason="every collective is an event; `torsh trace` sums them up"),
        "verbose": flag().hint("events have every call"),
        "prof_all": flag(True).hint("events have every call"),
        "prof_ops": words().hint("events have every call"),
        "debug": flag().hint("events have the caller's step"),
    },
)
FLOPS = SettingGroup(
    gate="enabled",
    settings={
        "enabled": flag().equivalent("td.train.EfficiencyMeter", "counts the operations of a step and their share"),
        "recompute_fwd_factor": number(0.0).hint("recomputed operations are counted as they run"),
        "profile_step": whole(1).hint("every step is measured"),
        "module_depth": whole(-1, least=-1).hint("`torsh trace` has the times of modules"),
        "top_modules": whole(1).hint("`torsh trace` has the times of modules"),
        "detailed": flag(True).hint("`torsh trace` has the times of modules"),
        "output_file": text().hint("the report is printed or kept as events"),
    },
)
TIMERS = SettingGroup(
    settings={
        "throughput": SettingGroup(
            is_checked=True,
            settings={
                "enabled": flag(True).equivalent("", "samples per second are a metric of every step"),
                "synchronized": flag(True).hint("steps are timed without stopping the device"),
            },
        )
    }
)
HYBRID = _all_refused(
    "generation inside training is not done here: generate with the model itself, or with an inference server",
    max_out_tokens=whole(512),
    inference_tp_size=whole(1),
    release_inference_cache=flag(),
    pin_parameters=flag(True),
    tp_gather_partition_size=whole(8),
    enable_cuda_graph=flag(),
)
AUTOTUNING = _all_refused("it starts many runs of other configs: `torsh plan` and `torsh tune` look for plans here")
CURRICULUM = SettingGroup(gate="enabled", settings={"enabled": flag()}, is_open=True)
DATA_EFFICIENCY = SettingGroup(
    gate="enabled",
    settings={
        "enabled": flag(),
        "seed": whole(1234).hint("the sampler has training.seed"),
        "data_sampling": SettingGroup(
            gate="enabled",
            settings={
                "enabled": flag(),
                "num_epochs": whole(1000).hint("the sampler has no end"),
                "num_workers": whole(0).hint("the DataLoader says it"),
                "pin_memory": flag().hint("the DataLoader says it"),
                "curriculum_learning": CURRICULUM,
                "dynamic_batching": _all_refused("batches have a fixed number of samples here"),
            },
        ),
        "data_routing": SettingGroup(
            gate="enabled",
            settings={
                "enabled": flag(),
                "random_ltd": _all_refused("random layer token drop changes the model's layers: not done here"),
            },
        ),
    },
)
LAYER_DROP = SettingGroup(
    gate="enabled", settings={"enabled": flag(), "theta": number(1.0, least=0), "gamma": number(0.001)}
)
ELASTICITY = SettingGroup(
    gate="enabled",
    settings={
        "enabled": flag(),
        "max_train_batch_size": whole(2000, least=1),
        "micro_batch_sizes": anything([2, 4, 6]),
        "min_gpus": whole(1, least=1),
        "max_gpus": whole(10000, least=1),
        "min_time": whole(0).hint("the scheduler of the cluster says how long a job runs"),
        "prefer_larger_batch": flag(True),
        "prefer_larger_batch_size": flag(True),
        "ignore_non_elastic_batch_info": flag(),
        "version": number(0.2),
        "model_parallel_size": whole(1, least=1),
        "num_gpus_per_node": whole(1, least=1),
    },
)
EIGENVALUE = _all_refused("quantization during training is not done here: see torchao")
COMPRESSION_TRAINING = SettingGroup(settings={}, is_open=True)
