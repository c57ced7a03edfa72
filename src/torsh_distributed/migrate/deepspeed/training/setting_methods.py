"""DeepSpeed's engine gives the values of its config as methods: `engine.train_batch_size()` and over a hundred more."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings

_ZERO = {
    "reduce_scatter": True,
    "allgather_partitions": True,
    "contiguous_gradients": True,
    "round_robin_gradients": False,
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "log_trace_cache_warnings": False,
}
"""Methods `zero_…()` of values of the same name, with DeepSpeed's defaults."""

_PATHS: dict[str, tuple[str, Any]] = {
    "zero_overlap_comm": ("zero_optimization.overlap_comm", None),
    "zero_offload_optimizer": ("zero_optimization.offload_optimizer", None),
    "zero_offload_param": ("zero_optimization.offload_param", None),
    "zero_partial_offload": ("zero_optimization.offload_optimizer.ratio", 1.0),
    "super_offload": ("zero_optimization.offload_optimizer.super_offload", False),
    "cpuadam_cores_perc": ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.9),
    "zero_multi_rank_bucket_allreduce": ("zero_optimization.use_multi_rank_bucket_allreduce", True),
    "zero_compute_grad_norm": ("zero_optimization.compute_grad_norm", True),
    "zero_max_live_parameters": ("zero_optimization.stage3_max_live_parameters", 1_000_000_000),
    "zero_max_reuse_distance": ("zero_optimization.stage3_max_reuse_distance", 1_000_000_000),
    "zero_prefetch_bucket_size": ("zero_optimization.stage3_prefetch_bucket_size", 50_000_000),
    "zero_module_granularity_threshold": ("zero_optimization.stage3_module_granularity_threshold", 0),
    "zero_param_persistence_threshold": ("zero_optimization.stage3_param_persistence_threshold", 100_000),
    "zero_model_persistence_threshold": ("zero_optimization.stage3_model_persistence_threshold", sys.maxsize),
    "zero_allgather_sequential": ("zero_optimization.stage3_allgather_sequential", False),
    "zero_hpz_partition_size": ("zero_optimization.zero_hpz_partition_size", 1),
    "zero_quantized_weights": ("zero_optimization.zero_quantized_weights", False),
    "zero_quantized_nontrainable_weights": ("zero_optimization.zero_quantized_nontrainable_weights", False),
    "zero_quantized_gradients": ("zero_optimization.zero_quantized_gradients", False),
    "zero_save_muon_momentum_buffer_in_memory": ("zero_optimization.save_muon_momentum_buffer_in_memory", False),
    "is_sanity_checks_enabled": ("zero_optimization.enable_sanity_checks", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "zenflow_config": ("zero_optimization.zenflow", None),
    "optimizer_params": ("optimizer.params", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "loss_scale": ("fp16.loss_scale", 0),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "steps_per_print": ("steps_per_print", None),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "memory_breakdown": ("memory_breakdown", False),
    "dump_state": ("dump_state", False),
    "log_level": ("log_level", None),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "checkpoint_serialization_enabled": ("checkpoint.checkpoint_serialization", True),
    "checkpoint_writer_enabled": ("checkpoint.writer", False),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    "autotuning_enabled": ("autotuning.enabled", False),
    "autotuning_start_profile_step": ("autotuning.start_profile_step", 3),
    "autotuning_end_profile_step": ("autotuning.end_profile_step", 5),
    "autotuning_metric": ("autotuning.metric", "throughput"),
    "tensor_parallel_config": ("tensor_parallel", None),
    "autotp_size": ("tensor_parallel.autotp_size", 0),
    "aio_config": ("aio", None),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "data_efficiency_config": ("data_efficiency", None),
    "data_sampling_enabled": ("data_efficiency.data_sampling.enabled", False),
    "data_sampling_config": ("data_efficiency.data_sampling", None),
    "curriculum_learning_enabled": ("data_efficiency.data_sampling.curriculum_learning.enabled", False),
    "curriculum_learning_config": ("data_efficiency.data_sampling.curriculum_learning", None),
    "curriculum_enabled_legacy": ("curriculum_learning.enabled", False),
    "curriculum_params_legacy": ("curriculum_learning", None),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "random_ltd_config": ("data_efficiency.data_routing.random_ltd", None),
    "pld_enabled": ("progressive_layer_drop.enabled", False),
    "pld_params": ("progressive_layer_drop", None),
    "pld_theta": ("progressive_layer_drop.theta", 1.0),
    "pld_gamma": ("progressive_layer_drop.gamma", 0.001),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "is_deepcompile_enabled": ("compile.deepcompile", False),
    **{f"zero_{name}": (f"zero_optimization.{name}", default) for name, default in _ZERO.items()},
}
"""Method to the value's path in a config, and DeepSpeed's default."""


class SettingMethods:
    """The methods; `_settings` holds the config. Those of `_PATHS` are added below."""

    _settings: RunSettings
    client_optimizer: Optimizer | None

    def train_batch_size(self) -> int:
        """Samples of one update, over all ranks."""
        return self._settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self._settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of one update."""
        return self._settings.batch.accumulation

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts microbatches."""
        return self._settings.is_managed

    def gradient_clipping(self) -> float:
        """The largest norm of the gradient; 0 for any."""
        return self._settings.clipping

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._settings.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self._settings.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self._settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self._settings.stage >= 3

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self._settings.offloads_optimizer

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` may gather the weights of stage 3."""
        zero = self._settings.section("zero_optimization")
        names = "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"
        return any(zero.get(name) is True for name in names)

    def fp16_enabled(self) -> bool:
        """Whether the module computes in fp16."""
        return self._settings.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the module computes in bf16."""
        return self._settings.dtype is torch.bfloat16

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the module, and the one in which gradients are accumulated."""
        return self._settings.dtype, torch.float32 if self._settings.accumulates_in_fp32 else self._settings.dtype

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return bool(self._settings.value("fp16.loss_scale", 0) == 0)

    def initial_dynamic_scale(self) -> float:
        """The loss scale at the start."""
        return float(2 ** int(self._settings.value("fp16.initial_scale_power", 16)))

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """What the dynamic loss scale is made with."""
        value = self._settings.value
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": value("fp16.loss_scale_window", 1000),
            "min_scale": value("fp16.min_loss_scale", 1),
            "delayed_shift": value("fp16.hysteresis", 2),
            "consecutive_hysteresis": value("fp16.consecutive_hysteresis", False),
        }

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after the sum."""
        return not self._settings.value("prescale_gradients", False)

    @property
    def communication_data_type(self) -> torch.dtype:
        """The format in which gradients are summed."""
        short = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return short.get(self._settings.reduce_dtype, self._settings.dtype)

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare their tags before a save."""
        return str(self._settings.value("checkpoint.tag_validation", "Warn")).lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ are an error."""
        return str(self._settings.value("checkpoint.tag_validation", "Warn")).lower() == "fail"

    def optimizer_name(self) -> str | None:
        """The class of the script's optimizer, or the config's type."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name: str | None = self._settings.value("optimizer.type")
        return name


def _method(name: str, path: str, default: Any) -> Any:
    def read(self: SettingMethods) -> Any:
        found = self._settings.value(path, default)
        return dict(found) if isinstance(found, Mapping) else found

    read.__name__, read.__doc__ = name, f"`{path}` of the config, by default {default!r}."
    return read


for _name, (_path, _default) in _PATHS.items():
    setattr(SettingMethods, _name, _method(_name, _path, _default))
