"""What scripts and libraries import from DeepSpeed: the modules, and the names in each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from types import ModuleType
from typing import Any, NoReturn

from torch.optim import Optimizer

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.migrate.deepspeed import elasticity, initialize_group, ops, script_start
from torsh_distributed.migrate.deepspeed.config import deepspeed_config
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.deepspeed_line import LOCAL_RANK_VARIABLE
from torsh_distributed.migrate.deepspeed.observing import deepspeed_timers, flops_profile, run_monitors
from torsh_distributed.migrate.deepspeed.pipe import (
    pipeline_engine,
    pipeline_module,
    rank_topology,
)
from torsh_distributed.migrate.deepspeed.schedules import lr_schedules
from torsh_distributed.migrate.deepspeed.surface import (
    activation_checkpointing,
    comm_calls,
    device_accelerator,
    moe_layer,
    script_helpers,
)
from torsh_distributed.migrate.deepspeed.training import deepspeed_engine, loss_scales, microbatch_loop
from torsh_distributed.migrate.deepspeed.zero import (
    fp32_weights,
    gathered_parameters,
    memory_estimates,
    param_access,
    tiled_linear,
)

_REFUSED = {
    "deepspeed": {
        "init_inference": "this engine trains: serve the model with vLLM or torch.compile",
        "tp_model_init": "use mesh.tp of a plan, through torsh_distributed.parallelize",
        "InferenceEngine": "this engine trains: serve the model with vLLM or torch.compile",
        "DeepSpeedHybridEngine": "train and generate with one engine: call engine.module.generate",
        "DeepSpeedTransformerLayer": "use torch.nn.TransformerEncoderLayer, or a model of transformers",
        "DeepSpeedTransformerConfig": "use torch.nn.TransformerEncoderLayer, or a model of transformers",
        "replace_transformer_layer": "use torch.compile",
        "module_inject": "use torch.compile",
    }
}

LATER_REFUSED = {
    "deepspeed.ops.sparse_attention": "DeepSpeed's sparse attention is compiled code: use torch's FlexAttention",
    "deepspeed.ops.transformer": "DeepSpeed's fused layers are compiled code: use torch.nn or transformers",
    "deepspeed.ops.op_builder": "nothing is compiled here: FusedAdam and DeepSpeedCPUAdam work as they are",
    "deepspeed.ops.aio": "use the plan's section offload for state on disk",
    "deepspeed.ops.quantizer": "quantise with torchao",
    "deepspeed.ops.fp_quantizer": "quantise with torchao",
    "deepspeed.ops.evoformer_attn": "DeepSpeed's evoformer attention is compiled code: use torch's FlexAttention",
    "deepspeed.inference": "this engine trains: serve the model with vLLM or torch.compile",
    "deepspeed.module_inject": "use torch.compile",
    "deepspeed.compression": "quantise or prune with torchao",
    "deepspeed.autotuning": "let `torsh plan` choose",
    "deepspeed.runtime.hybrid_engine": "train and generate with one engine: call engine.module.generate",
    "deepspeed.runtime.sequence_parallel": "use mesh.cp of a plan, through torsh_distributed.parallelize",
    "deepspeed.sequence": "use mesh.cp of a plan, through torsh_distributed.parallelize",
    "deepspeed.linear": "use PEFT",
}
"""Modules whose import is refused, with what to do instead."""


def refused_names(module: str) -> dict[str, Any]:
    """The names of a module that raise when they are called."""
    return {name: RefusedName(f"{module}.{name}", hint) for name, hint in _REFUSED[module].items()}


class RefusedName:
    """Stands for a name of DeepSpeed; importing it is harmless, using it raises FeatureNotAvailable."""

    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint

    def _refuse(self) -> NoReturn:
        raise FeatureNotAvailable(f"{self._name} is not part of torsh_distributed's deepspeed", hint=self._hint)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        """Refuse, unless Python itself asks."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


VERSION = "0.19.8"
"""The DeepSpeed whose surface this is."""

MISSING = LATER_REFUSED
"""Modules that are not there, with the reason; `import` of one raises it."""


def set_variables(environ: MutableMapping[str, str]) -> None:
    """What DeepSpeed's launcher gives a worker: our variables, and `--local_rank=N` before its arguments.

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
        **_public(gathered_parameters, "register_external_parameter", "unregister_external_parameter"),
        **_public(tiled_linear, "TiledLinear", "TiledLinearReturnBias"),
        **_public(param_access, "ZeroParamStatus", "ZeroParamType"),
    }
    accelerator = _public(device_accelerator, "get_accelerator")
    checkpointing = _functions(activation_checkpointing)
    pipe = {
        **_public(pipeline_module, "LayerSpec", "PipelineModule", "TiedLayerSpec"),
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
        **_public(microbatch_loop, "RepeatingLoader"),
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
            "DeepSpeedDataLoader": microbatch_loop.DeepSpeedDataLoader,
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
        "deepspeed.ops.adam": _public(ops, "FusedAdam", "DeepSpeedCPUAdam"),
        "deepspeed.ops.adam.fused_adam": _public(ops, "FusedAdam"),
        "deepspeed.ops.adam.cpu_adam": _public(ops, "DeepSpeedCPUAdam"),
        "deepspeed.ops.lamb": _public(ops, "FusedLamb"),
        "deepspeed.ops.lion": _public(ops, "FusedLion", "DeepSpeedCPULion"),
        "deepspeed.ops.adagrad": _public(ops, "DeepSpeedCPUAdagrad"),
        "deepspeed.elasticity": _functions(elasticity),
        "deepspeed.moe": {},
        "deepspeed.moe.layer": _public(moe_layer, "MoE"),
        "deepspeed.moe.utils": {name: value for name, value in _functions(moe_layer).items() if name != "MoE"},
        "deepspeed.monitor": {},
        "deepspeed.monitor.monitor": _public(run_monitors, "MonitorMaster"),
        "deepspeed.profiling": {},
        "deepspeed.profiling.flops_profiler": profiler,
        "deepspeed.profiling.flops_profiler.profiler": profiler,
        "deepspeed.runtime": {},
        "deepspeed.runtime.engine": engines,
        "deepspeed.runtime.base_optimizer": {"DeepSpeedOptimizer": Optimizer, "ZeROOptimizer": Optimizer},
        "deepspeed.runtime.config": config,
        "deepspeed.runtime.config_utils": _public(deepspeed_config, "DeepSpeedConfigModel"),
        "deepspeed.runtime.precision_config": _public(deepspeed_config, "DeepSpeedFP16Config", "DeepSpeedBF16Config"),
        "deepspeed.runtime.lr_schedules": schedules,
        "deepspeed.runtime.dataloader": _public(microbatch_loop, "RepeatingLoader", "DeepSpeedDataLoader"),
        "deepspeed.runtime.utils": {
            **_public(script_helpers, "see_memory_usage", "set_random_seed"),
            **_public(pipeline_module, "partition_uniform", "partition_balanced"),
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
        "deepspeed.runtime.zero.config": _public(deepspeed_config, "DeepSpeedZeroConfig"),
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
