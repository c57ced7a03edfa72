"""What scripts and libraries import from DeepSpeed: the modules, and the names in each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed import elasticity, initialize_group, ops, script_start
from torsh_distributed.migrate.deepspeed.config import config_helpers, key_constants, section_models
from torsh_distributed.migrate.deepspeed.config.script_config import ScriptConfig
from torsh_distributed.migrate.deepspeed.deepspeed_line import LOCAL_RANK_VARIABLE
from torsh_distributed.migrate.deepspeed.moe import expert_modules, gating, moe_layer
from torsh_distributed.migrate.deepspeed.observing import deepspeed_timers, flops_profile, run_monitors
from torsh_distributed.migrate.deepspeed.pipe import pipeline_engine, pipeline_module, rank_topology
from torsh_distributed.migrate.deepspeed.schedules import curriculum, lr_schedules
from torsh_distributed.migrate.deepspeed.surface import (
    activation_checkpointing,
    comm_calls,
    device_accelerator,
    op_builders,
    runtime_helpers,
    script_helpers,
    script_imports,
)
from torsh_distributed.migrate.deepspeed.surface.refused_names import REFUSED_MODULES, refused_names
from torsh_distributed.migrate.deepspeed.training import deepspeed_engine, loss_scales, microbatch_loop
from torsh_distributed.migrate.deepspeed.zero import (
    fp32_weights,
    gathered_parameters,
    memory_estimates,
    optimizer_kinds,
    param_access,
    tiled_linear,
)

VERSION = "0.19.8"
"""The DeepSpeed whose surface this is."""

MISSING = REFUSED_MODULES
"""Modules that are not there, with the reason; `import` of one raises it."""

Names = dict[str, Any]
_VERSIONS: Names = {"version": VERSION, "git_hash": "unknown", "git_branch": "unknown", "__version__": VERSION}


def set_variables(environ: MutableMapping[str, str]) -> None:
    """What DeepSpeed's launcher gives a worker: our variables, and `--local_rank=N` before its arguments.

    The latter only if the line was one of that launcher, which a script then expects.
    """
    is_expected = environ.get(LOCAL_RANK_VARIABLE) == "1" and "LOCAL_RANK" in environ
    if is_expected and not any(word.startswith(("--local_rank", "--local-rank")) for word in sys.argv):
        sys.argv.insert(1, f"--local_rank={environ['LOCAL_RANK']}")


def namespaces() -> Mapping[str, Mapping[str, Any]]:
    """Every module by its name in DeepSpeed, parents first."""
    found: dict[str, Names] = {
        **_top(),
        **_utils(),
        **_ops(),
        **_runtime(),
        **_pipe(),
        **_zero(),
        **_optimizers(),
        **script_imports.import_names(),
    }
    for name in found:
        found[name] = {**refused_names(name), **found[name]}
    return found


def _top() -> dict[str, Names]:
    """The package itself, and the modules beside `runtime`, `utils` and `ops`."""
    comm, accelerator = comm_calls.comm_names(), _public(device_accelerator, "get_accelerator")
    profiler = _public(
        flops_profile,
        "FlopsProfiler",
        "get_model_profile",
        "number_to_string",
        "flops_to_string",
        "macs_to_string",
        "params_to_string",
        "duration_to_string",
    )
    of_elasticity = {
        **_functions(elasticity),
        "ElasticityConfig": elasticity.ElasticSettings,
        **dict.fromkeys(
            ("ElasticityError", "ElasticityConfigError", "ElasticityIncompatibleWorldSize"), ConfigurationError
        ),
    }
    return {
        "deepspeed": {
            **_VERSIONS,
            **_public(script_start, "initialize", "add_config_arguments"),
            **_public(initialize_group, "init_distributed"),
            **accelerator,
            **_engines(),
            **_config(),
            **_public(pipeline_engine, "PipelineEngine"),
            **_public(pipeline_module, "PipelineModule"),
            **_public(microbatch_loop, "DeepSpeedDataLoader"),
            **_public(script_helpers, "logger", "log_dist", "OnDevice"),
            "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
            "HAS_TRITON": False,
        },
        "deepspeed.git_version_info": {**_VERSIONS, "installed_ops": {}, "compatible_ops": {}, "torch_info": {}},
        "deepspeed.constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": 29500},
        "deepspeed.accelerator": {**accelerator, "DeepSpeedAccelerator": device_accelerator.TorshAccelerator},
        "deepspeed.accelerator.real_accelerator": accelerator,
        "deepspeed.comm": comm,
        "deepspeed.comm.comm": comm,
        "deepspeed.dist": comm,
        "deepspeed.checkpointing": _functions(activation_checkpointing),
        "deepspeed.checkpoint": {},
        "deepspeed.checkpoint.utils": _public(fp32_weights, "clone_tensors_for_torch_save"),
        "deepspeed.elasticity": of_elasticity,
        "deepspeed.elasticity.config": of_elasticity,
        "deepspeed.elasticity.elasticity": of_elasticity,
        "deepspeed.moe": {},
        "deepspeed.moe.layer": _public(moe_layer, "MoE"),
        "deepspeed.moe.experts": {"Experts": expert_modules.ExpertModules},
        "deepspeed.moe.sharded_moe": {**_public(moe_layer, "MOELayer"), **_public(gating, "TopKGate")},
        "deepspeed.moe.utils": _functions(moe_layer),
        "deepspeed.monitor": {},
        "deepspeed.monitor.monitor": {**_public(run_monitors, "MonitorMaster"), "Monitor": run_monitors.RunMonitor},
        **{name: dict(classes) for name, classes in run_monitors.script_monitors().items()},
        "deepspeed.monitor.config": _public(config_helpers, "get_monitor_config")
        | _public(
            section_models, "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "CSVConfig", "CometConfig"
        ),
        "deepspeed.profiling": {},
        "deepspeed.profiling.flops_profiler": profiler,
        "deepspeed.profiling.flops_profiler.profiler": profiler,
        "deepspeed.profiling.config": _public(section_models, "DeepSpeedFlopsProfilerConfig"),
    }


def _utils() -> dict[str, Names]:
    full_access = {name: getattr(param_access, name) for name in dir(param_access) if name.startswith("safe_")}
    leaves = {name: value for name, value in _functions(script_helpers).items() if "z3_leaf" in name}
    logs = _public(script_helpers, "logger", "log_dist", "log_dist_once", "set_log_level_from_string")
    groups = script_helpers.group_names()
    return {
        "deepspeed.utils": {
            **groups,
            **logs,
            **leaves,
            **full_access,
            **_public(script_helpers, "OnDevice", "instrument_w_nvtx"),
            **_public(script_helpers, "get_caller_func", "recursive_getattr", "recursive_setattr"),
            **_public(microbatch_loop, "RepeatingLoader"),
        },
        "deepspeed.utils.logging": {**logs, **_public(script_helpers, "print_rank_0", "warning_once")},
        "deepspeed.utils.groups": groups,
        "deepspeed.utils.timer": _public(
            deepspeed_timers, "SynchronizedWallClockTimer", "ThroughputTimer", "NoopTimer"
        ),
        "deepspeed.utils.zero_to_fp32": _functions(fp32_weights),
        "deepspeed.utils.tensor_fragment": full_access,
        "deepspeed.utils.z3_leaf_module": leaves,
        "deepspeed.utils.init_on_device": _public(script_helpers, "OnDevice"),
        "deepspeed.utils.torch": _public(runtime_helpers, "required_torch_version"),
        "deepspeed.utils.nvtx": _public(script_helpers, "instrument_w_nvtx"),
    }


def _ops() -> dict[str, Names]:
    return {
        "deepspeed.ops": {},
        "deepspeed.ops.op_builder": op_builders.builder_names(),
        "deepspeed.ops.adam": _public(ops, "FusedAdam", "DeepSpeedCPUAdam"),
        "deepspeed.ops.adam.fused_adam": _public(ops, "FusedAdam"),
        "deepspeed.ops.adam.cpu_adam": _public(ops, "DeepSpeedCPUAdam"),
        "deepspeed.ops.lamb": _public(ops, "FusedLamb"),
        "deepspeed.ops.lion": _public(ops, "FusedLion", "DeepSpeedCPULion"),
        "deepspeed.ops.adagrad": _public(ops, "DeepSpeedCPUAdagrad"),
    }


def _runtime() -> dict[str, Names]:
    checkpointing = _functions(activation_checkpointing)
    scheduler = {"CurriculumScheduler": curriculum.CurriculumSchedule}
    return {
        "deepspeed.runtime": {},
        "deepspeed.runtime.engine": {
            **_engines(),
            **_public(microbatch_loop, "DeepSpeedDataLoader"),
            "MEMORY_OPT_ALLREDUCE_SIZE": 500000000,
        },
        "deepspeed.runtime.config": {**_config(), **key_constants.optimizer_names()},
        "deepspeed.runtime.config_utils": {
            **{name: value for name, value in vars(config_helpers).items() if name.startswith(("get_", "dict_"))},
            **_public(config_helpers, "DeepSpeedConfigObject"),
            **_public(section_models, "DeepSpeedConfigModel"),
        },
        "deepspeed.runtime.constants": key_constants.key_constants(),
        "deepspeed.runtime.precision_config": _public(section_models, "DeepSpeedFP16Config", "DeepSpeedBF16Config"),
        "deepspeed.runtime.lr_schedules": {
            **lr_schedules.schedule_constants(),
            **lr_schedules.SCHEDULES,
            **_public(lr_schedules, "add_tuning_arguments", "parse_arguments"),
            **_public(lr_schedules, "get_config_from_args", "get_lr_from_config"),
        },
        "deepspeed.runtime.dataloader": _public(microbatch_loop, "RepeatingLoader", "DeepSpeedDataLoader"),
        "deepspeed.runtime.progressive_layer_drop": _public(curriculum, "ProgressiveLayerDrop"),
        "deepspeed.runtime.data_pipeline": {},
        "deepspeed.runtime.data_pipeline.curriculum_scheduler": scheduler,
        "deepspeed.runtime.sparse_tensor": {},
        "deepspeed.runtime.utils": {
            **_functions(runtime_helpers),
            **_public(script_helpers, "see_memory_usage", "set_random_seed"),
            **_public(pipeline_module, "partition_uniform", "partition_balanced"),
        },
        "deepspeed.runtime.activation_checkpointing": {},
        "deepspeed.runtime.activation_checkpointing.checkpointing": checkpointing,
        "deepspeed.runtime.activation_checkpointing.config": _public(
            section_models, "DeepSpeedActivationCheckpointingConfig"
        ),
    }


def _pipe() -> dict[str, Names]:
    modules = _public(pipeline_module, "LayerSpec", "PipelineModule", "TiedLayerSpec")
    topology = _public(
        rank_topology,
        "ProcessTopology",
        "PipeDataParallelTopology",
        "PipeModelDataParallelTopology",
        "PipelineParallelGrid",
    )
    return {
        "deepspeed.pipe": modules,
        "deepspeed.runtime.pipe": {**modules, **topology},
        "deepspeed.runtime.pipe.module": modules,
        "deepspeed.runtime.pipe.engine": _public(pipeline_engine, "PipelineEngine"),
        "deepspeed.runtime.pipe.topology": topology,
    }


def _zero() -> dict[str, Names]:
    of_sharded = {
        **_public(gathered_parameters, "Init", "GatheredParameters", "unwrap_model_for_generation"),
        **_public(gathered_parameters, "register_external_parameter", "unregister_external_parameter"),
        **_public(tiled_linear, "TiledLinear", "TiledLinearReturnBias"),
        **_public(param_access, "ZeroParamStatus", "ZeroParamType"),
        "MiCS_Init": gathered_parameters.Init,
    }
    offload = _public(
        section_models,
        "OffloadDeviceEnum",
        "OffloadStateTypeEnum",
        "DeepSpeedZeroOffloadParamConfig",
        "DeepSpeedZeroOffloadOptimizerConfig",
    )
    memory = {name: getattr(memory_estimates, name) for name in dir(memory_estimates) if name.startswith("estimate_")}
    early = {**memory, **_public(optimizer_kinds, "DeepSpeedZeroOptimizer")}
    return {
        "deepspeed.zero": of_sharded,
        "deepspeed.runtime.zero": of_sharded,
        "deepspeed.runtime.zero.config": {
            **offload,
            **_public(section_models, "DeepSpeedZeroConfig", "ZeroStageEnum"),
        },
        "deepspeed.runtime.zero.offload_config": offload,
        "deepspeed.runtime.zero.partition_parameters": of_sharded,
        "deepspeed.runtime.zero.mics": {"MiCS_Init": gathered_parameters.Init},
        "deepspeed.runtime.zero.tiling": _public(tiled_linear, "TiledLinear", "TiledLinearReturnBias"),
        "deepspeed.runtime.zero.stage3": {
            **memory,
            **_public(optimizer_kinds, "DeepSpeedZeroOptimizer_Stage3"),
            **_public(gathered_parameters, "unwrap_model_for_generation"),
        },
        "deepspeed.runtime.zero.stage_1_and_2": early,
        "deepspeed.runtime.zero.stage2": early,
        "deepspeed.runtime.zero.utils": {
            **_public(param_access, "is_zero_param"),
            **_public(
                optimizer_kinds, "ZeRORuntimeException", "ZERO_SUPPORTED_OPTIMIZERS", "is_zero_supported_optimizer"
            ),
        },
    }


def _optimizers() -> dict[str, Names]:
    """What engine.optimizer is an instance of."""
    scales = _public(loss_scales, "LossScaler", "DynamicLossScaler", "CreateLossScaler")
    return {
        "deepspeed.runtime.base_optimizer": {
            "DeepSpeedOptimizer": Optimizer,
            **_public(optimizer_kinds, "ZeROOptimizer"),
        },
        "deepspeed.runtime.bf16_optimizer": _public(optimizer_kinds, "BF16_Optimizer"),
        "deepspeed.runtime.fp16": {},
        "deepspeed.runtime.fp16.loss_scaler": scales,
        "deepspeed.runtime.fp16.fused_optimizer": _public(optimizer_kinds, "FP16_Optimizer"),
        "deepspeed.runtime.fp16.unfused_optimizer": _public(optimizer_kinds, "FP16_UnfusedOptimizer"),
    }


def _engines() -> Names:
    return {
        **_public(deepspeed_engine, "DeepSpeedEngine"),
        "DeepSpeedOptimizer": Optimizer,
        "DeepSpeedOptimizerCallable": Callable[..., Optimizer],
        "DeepSpeedSchedulerCallable": Callable[..., Any],
    }


def _config() -> Names:
    return {"DeepSpeedConfig": ScriptConfig, "DeepSpeedConfigError": ConfigurationError}


def _public(module: ModuleType, *names: str) -> Names:
    return {name: getattr(module, name) for name in names}


def _functions(module: ModuleType) -> Names:
    """The public names that a module itself defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
