"""What scripts and libraries import from DeepSpeed: the modules, and the names in each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed import elasticity, initialize_group, script_start
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.launching.deepspeed_line import LOCAL_RANK_VARIABLE
from torsh_distributed.migrate.deepspeed.observing import deepspeed_timers, flops_profile, run_monitors
from torsh_distributed.migrate.deepspeed.ops import adam_optimizers, lamb_optimizer, lion_optimizer
from torsh_distributed.migrate.deepspeed.pipe import (
    layer_specs,
    pipeline_engine,
    pipeline_module,
    rank_topology,
    stage_partition,
)
from torsh_distributed.migrate.deepspeed.schedules import lr_schedules
from torsh_distributed.migrate.deepspeed.surface import (
    activation_checkpointing,
    comm_calls,
    config_models,
    device_accelerator,
    moe_layer,
    moe_params,
    script_helpers,
)
from torsh_distributed.migrate.deepspeed.surface.refused_names import LATER_REFUSED, refused_names
from torsh_distributed.migrate.deepspeed.training import deepspeed_engine, loss_scales, training_data
from torsh_distributed.migrate.deepspeed.zero import (
    external_params,
    fp32_weights,
    gathered_parameters,
    memory_estimates,
    param_access,
    tiled_linear,
    zero_params,
)

VERSION = "0.19.8"
"""The DeepSpeed whose surface this is."""

MISSING = LATER_REFUSED
"""Modules that are not there, with the reason; `import` of one raises it."""


def set_variables(environ: MutableMapping[str, str]) -> None:
    """What DeepSpeed's launcher gives a worker: the variables of ours, and `--local_rank=N` before its arguments.

    The latter only if the line was one of that launcher, which a script then expects.
    """
    is_expected = environ.get(LOCAL_RANK_VARIABLE) == "1" and "LOCAL_RANK" in environ
    if is_expected and not any(word.startswith(("--local_rank", "--local-rank")) for word in sys.argv):
        sys.argv.insert(1, f"--local_rank={environ['LOCAL_RANK']}")


def namespaces() -> Mapping[str, Mapping[str, Any]]:
    """Every module by its name in DeepSpeed, parents first."""
    comm = comm_calls.comm_names()
    zero = {
        **_public(gathered_parameters, "Init", "GatheredParameters", "unwrap_model_for_generation"),
        **_public(external_params, "register_external_parameter", "unregister_external_parameter"),
        **_public(tiled_linear, "TiledLinear", "TiledLinearReturnBias"),
        **_public(zero_params, "ZeroParamStatus", "ZeroParamType"),
    }
    accelerator = _public(device_accelerator, "get_accelerator")
    checkpointing = _functions(activation_checkpointing)
    pipe = {
        **_public(layer_specs, "LayerSpec", "TiedLayerSpec"),
        **_public(pipeline_module, "PipelineModule"),
    }
    topology = _public(
        rank_topology,
        "ProcessTopology",
        "PipeDataParallelTopology",
        "PipeModelDataParallelTopology",
        "PipelineParallelGrid",
    )
    schedules = {
        **lr_schedules.SCHEDULES,
        "VALID_LR_SCHEDULES": list(lr_schedules.SCHEDULES),
    }
    config = {"DeepSpeedConfig": DeepSpeedConfig, "DeepSpeedConfigError": ConfigurationError}
    full_access = {name: getattr(param_access, name) for name in dir(param_access) if name.startswith("safe_")}
    utils = {
        **_public(
            script_helpers,
            "logger",
            "log_dist",
            "OnDevice",
            "instrument_w_nvtx",
            "set_z3_leaf_modules",
            "unset_z3_leaf_modules",
            "set_z3_leaf_module",
            "get_z3_leaf_modules",
            "z3_leaf_module",
        ),
        **_public(training_data, "RepeatingLoader"),
        **full_access,
    }
    engines = {
        "DeepSpeedEngine": deepspeed_engine.DeepSpeedEngine,
        "DeepSpeedOptimizer": Optimizer,
    }
    memory = {name: getattr(memory_estimates, name) for name in dir(memory_estimates) if name.startswith("estimate_")}
    scales = _public(loss_scales, "LossScaler", "DynamicLossScaler", "CreateLossScaler")
    weights = _functions(fp32_weights)
    profiler = _public(flops_profile, "FlopsProfiler", "get_model_profile")
    version = {"version": VERSION, "git_hash": None, "git_branch": None, "__version__": VERSION}
    found: dict[str, Mapping[str, Any]] = {
        "deepspeed": {
            **version,
            **_public(script_start, "initialize", "add_config_arguments"),
            **_public(initialize_group, "init_distributed"),
            **accelerator,
            **engines,
            **config,
            "PipelineEngine": pipeline_engine.PipelineEngine,
            "PipelineModule": pipeline_module.PipelineModule,
            "DeepSpeedDataLoader": training_data.DeepSpeedDataLoader,
            **_public(script_helpers, "logger", "log_dist", "OnDevice"),
            "dist": None,
            "HAS_TRITON": False,
            **refused_names("deepspeed"),
        },
        "deepspeed.git_version_info": version,
        "deepspeed.constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": 29500},
        "deepspeed.accelerator": accelerator,
        "deepspeed.accelerator.real_accelerator": accelerator,
        "deepspeed.comm": comm,
        "deepspeed.comm.comm": comm,
        "deepspeed.zero": zero,
        "deepspeed.pipe": pipe,
        "deepspeed.checkpointing": checkpointing,
        "deepspeed.checkpoint": {},
        "deepspeed.checkpoint.utils": _public(fp32_weights, "clone_tensors_for_torch_save"),
        "deepspeed.utils": {**utils, "zero_to_fp32": None, "groups": None},
        "deepspeed.utils.logging": _public(script_helpers, "logger", "log_dist", "print_rank_0"),
        "deepspeed.utils.groups": script_helpers.group_names(),
        "deepspeed.utils.timer": _public(deepspeed_timers, "SynchronizedWallClockTimer", "ThroughputTimer"),
        "deepspeed.utils.zero_to_fp32": weights,
        "deepspeed.utils.tensor_fragment": full_access,
        "deepspeed.utils.nvtx": _public(script_helpers, "instrument_w_nvtx"),
        "deepspeed.ops": {},
        "deepspeed.ops.adam": _public(adam_optimizers, "FusedAdam", "DeepSpeedCPUAdam"),
        "deepspeed.ops.adam.fused_adam": _public(adam_optimizers, "FusedAdam"),
        "deepspeed.ops.adam.cpu_adam": _public(adam_optimizers, "DeepSpeedCPUAdam"),
        "deepspeed.ops.lamb": _public(lamb_optimizer, "FusedLamb"),
        "deepspeed.ops.lion": _public(lion_optimizer, "FusedLion", "DeepSpeedCPULion"),
        "deepspeed.ops.adagrad": _public(adam_optimizers, "DeepSpeedCPUAdagrad"),
        "deepspeed.elasticity": _functions(elasticity),
        "deepspeed.moe": {},
        "deepspeed.moe.layer": _public(moe_layer, "MoE"),
        "deepspeed.moe.utils": _functions(moe_params),
        "deepspeed.monitor": {},
        "deepspeed.monitor.monitor": _public(run_monitors, "MonitorMaster"),
        "deepspeed.profiling": {},
        "deepspeed.profiling.flops_profiler": profiler,
        "deepspeed.profiling.flops_profiler.profiler": profiler,
        "deepspeed.runtime": {},
        "deepspeed.runtime.engine": engines,
        "deepspeed.runtime.base_optimizer": {"DeepSpeedOptimizer": Optimizer, "ZeROOptimizer": Optimizer},
        "deepspeed.runtime.config": config,
        "deepspeed.runtime.config_utils": _public(config_models, "DeepSpeedConfigModel"),
        "deepspeed.runtime.precision_config": _public(config_models, "DeepSpeedFP16Config", "DeepSpeedBF16Config"),
        "deepspeed.runtime.lr_schedules": schedules,
        "deepspeed.runtime.dataloader": _public(training_data, "RepeatingLoader", "DeepSpeedDataLoader"),
        "deepspeed.runtime.utils": {
            **_public(script_helpers, "see_memory_usage", "set_random_seed"),
            **_public(stage_partition, "partition_uniform", "partition_balanced"),
        },
        "deepspeed.runtime.fp16": {},
        "deepspeed.runtime.fp16.loss_scaler": scales,
        "deepspeed.runtime.activation_checkpointing": {},
        "deepspeed.runtime.activation_checkpointing.checkpointing": checkpointing,
        "deepspeed.runtime.pipe": {**pipe, **topology},
        "deepspeed.runtime.pipe.module": pipe,
        "deepspeed.runtime.pipe.engine": _public(pipeline_engine, "PipelineEngine"),
        "deepspeed.runtime.pipe.topology": topology,
        "deepspeed.runtime.zero": zero,
        "deepspeed.runtime.zero.config": _public(config_models, "DeepSpeedZeroConfig"),
        "deepspeed.runtime.zero.partition_parameters": zero,
        "deepspeed.runtime.zero.tiling": _public(tiled_linear, "TiledLinear", "TiledLinearReturnBias"),
        "deepspeed.runtime.zero.stage3": memory,
        "deepspeed.runtime.zero.stage_1_and_2": memory,
        "deepspeed.runtime.zero.stage2": memory,
    }
    return found


def _public(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _functions(module: ModuleType) -> dict[str, Any]:
    """The public names that a module itself defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
