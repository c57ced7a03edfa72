"""`deepspeed.DeepSpeedConfig` as scripts read it: `DeepSpeedConfig("ds.json").train_batch_size`. Imports no torch."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config import section_models as models
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.config.hjson_format import ConfigSource
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import AUTO, SettingGroup
from torsh_distributed.migrate.deepspeed.deepspeed_errors import DeepSpeedMistake, require

STRICT_VARIABLE = "TORSH_STRICT_CONFIG"
"""Tells workers that a key without effect is an error, not a warning."""

_PLAIN = (
    "managed_gradient_accumulation",
    "steps_per_print",
    "dump_state",
    "disable_allgather",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "memory_breakdown",
    "dataloader_drop_last",
    "log_level",
    "vocabulary_size",
    "graph_harvesting",
)
"""Attributes that are top-level keys."""

_PATHS = {
    "sparse_gradients_enabled": "sparse_gradients",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "pld_enabled": "progressive_layer_drop.enabled",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "elasticity_enabled": "elasticity.enabled",
    "amp_enabled": "amp.enabled",
}
"""Attributes under another name, or inside a section."""

_SECTIONS = {
    "pld_params": "progressive_layer_drop",
    "data_efficiency_config": "data_efficiency",
    "curriculum_params_legacy": "curriculum_learning",
    "pipeline": "pipeline",
    "aio_config": "aio",
    "checkpoint_config": "checkpoint",
    "compile_config": "compile",
    "hybrid_engine": "hybrid_engine",
    "autotuning_config": "autotuning",
    "tensor_parallel_config": "tensor_parallel",
    "timers_config": "timers",
}
"""Attributes that are sections, as dicts of what is given."""

_OPTIMIZERS = (
    *("adagrad", "adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam"),
    *("muadam", "muadamw", "musgd", "lion", "muon"),
)
"""Optimizers whose names DeepSpeed takes in any case, and gives in lower case."""


class ScriptConfig(DeepSpeedConfig):
    """A config with DeepSpeed's attributes: a path or a dict, for the ranks of this job.

    The three batch sizes are resolved for the data parallel ranks: those of `mpu`, or the world, or 1 before it is up.
    A contradiction is an AssertionError or a ValueError, as in DeepSpeed. Keys that DeepSpeed ignores are warned of, or
    errors under `torsh run --as deepspeed --strict`. In sections that DeepSpeed checks, "auto" is the default.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    def __init__(
        self, config: ConfigSource, mpu: Any = None, mesh_device: Any = None, *, data_ranks: int | None = None
    ) -> None:
        """`data_ranks`: the ranks with samples of their own, for an engine that knows them."""
        self.is_strict = known_variables.is_on(STRICT_VARIABLE)
        super().__init__(config, strict=self.is_strict)
        self._param_dict = self.values
        self.global_rank, self.world_size = _place(mpu, mesh_device, self.values)
        if data_ranks is not None:
            self.world_size = data_ranks
        for name in _PLAIN:
            setattr(self, name, self.get(name))
        for name, path in _PATHS.items():
            setattr(self, name, self.get(path))
        for name, section in _SECTIONS.items():
            setattr(self, name, dict(self.get(section) or {}))
        self._read_sections()
        self._check()
        try:
            batch = self.batch(self.world_size)
        except ConfigurationError as error:
            raise DeepSpeedMistake(error.message, hint=error.hint, **error.context) from error
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    @override
    def _prepare(self) -> None:
        super()._prepare()
        if self.values.get("steps_per_print") == float("inf"):  # how Accelerate says "never"
            del self.values["steps_per_print"]
        _drop_auto(self.values, KNOWN)

    def _read_sections(self) -> None:
        section = self._section
        self.zero_config = models.DeepSpeedZeroConfig(**section("zero_optimization"))
        self.zero_optimization_stage: int = self.zero_config.stage  # type: ignore[attr-defined]  # a field made from a table
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = models.DeepSpeedFP16Config(**section("fp16"))
        self.bfloat16_config = models.DeepSpeedBF16Config(**(section("bf16") or section("bfloat16")))
        self.fp16_enabled, self.bfloat16_enabled = bool(self.get("fp16.enabled")), self._is_bf16()
        self.loss_scale = self.get("fp16.loss_scale")
        self.initial_dynamic_scale = 2 ** int(self.get("fp16.initial_scale_power"))
        self.optimizer_name = self.get("optimizer.type")
        if str(self.optimizer_name).lower() in _OPTIMIZERS:
            self.optimizer_name = str(self.optimizer_name).lower()
        self.activation_checkpointing_config = models.DeepSpeedActivationCheckpointingConfig(
            **section("activation_checkpointing", known=True)
        )
        self.comms_config = models.DeepSpeedCommsConfig(**section("comms_logger"))
        self.flops_profiler_config = models.DeepSpeedFlopsProfilerConfig(**section("flops_profiler", known=True))
        self.wall_clock_breakdown = bool(self.get("wall_clock_breakdown")) or bool(self.get("flops_profiler.enabled"))
        self.monitor_config = models.DeepSpeedMonitorConfig(
            tensorboard=models.TensorBoardConfig(**section("tensorboard")),
            wandb=models.WandbConfig(**section("wandb")),
            csv_monitor=models.CSVConfig(**section("csv_monitor")),
        )
        mode = str(self.get("checkpoint.tag_validation")).lower()
        self.checkpoint_tag_validation_enabled = mode != "ignore"
        self.checkpoint_tag_validation_fail = mode == "fail"

    def _section(self, name: str, *, known: bool = False) -> dict[str, Any]:
        """What is given of a section; `known`: only keys that DeepSpeed has, where it ignores others."""
        given = self.values.get(name)
        found = dict(given) if isinstance(given, Mapping) else {}
        group = KNOWN.settings[name]
        assert isinstance(group, SettingGroup), "sections alone are asked for"
        return {key: value for key, value in found.items() if key in group.settings} if known else found

    def _is_bf16(self) -> bool:
        return bool(self.get("bf16.enabled") or self.get("bfloat16.enabled"))

    def _check(self) -> None:
        """What DeepSpeed refuses when it reads a config."""
        require(
            not (self.fp16_enabled and self.bfloat16_enabled),
            "bfloat16 and fp16 modes cannot be simultaneously enabled",
            hint='set "enabled" of one of the two sections to false',
        )
        if self.get("gradient_allreduce_op") == "sum" and self.zero_optimization_stage == models.ZeroStageEnum.weights:
            raise ConfigurationError(
                "gradient_allreduce_op='sum' is not supported with ZeRO stage 3",
                hint="multiply the loss by the number of ranks",
            )
        names = (
            "fp16.fp16_master_weights_and_grads",
            "bf16.bf16_master_weights_and_grads",
            "bf16.bf16_optimizer_states",
        )
        for name in names:
            require(
                self.zero_enabled or not self.get(name),
                f"{name.rpartition('.')[2].capitalize()} is only supported with ZeRO Stage 1, 2, or 3.",
            )
        require(
            self.get(names[1]) or not self.get(names[2]),
            "bf16_optimizer_states requires bf16_master_weights_and_grads to be enabled.",
        )

    def print_user_config(self) -> None:
        """Log the config as it was given."""
        _log_lines("json", json.dumps(self.values, indent=2, default=str))

    def print(self, name: str) -> None:
        """Log every attribute, and the config."""
        shown = {key: value for key, value in sorted(vars(self).items()) if not key.startswith("_")}
        _log_lines(name, "\n".join(f"{key}: {value}" for key, value in shown.items()))
        self.print_user_config()


def _log_lines(name: str, text: str) -> None:
    logging.getLogger("DeepSpeed").info("%s:\n%s", name, text)


def _drop_auto(values: dict[str, Any], group: SettingGroup) -> None:
    """Without a trainer that fills it, "auto" means the default where DeepSpeed checks a section."""
    for name, value in list(values.items()):
        setting = group.settings.get(name)
        if isinstance(setting, SettingGroup) and isinstance(value, dict):
            _drop_auto(value, setting)
        elif group.is_checked and value == AUTO:
            del values[name]


def _place(mpu: Any, mesh_device: Any, values: Mapping[str, Any]) -> tuple[int, int]:
    """This rank, and the number of ranks that have samples of their own."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return 0, 1
    rank, num_ranks = int(torch.distributed.get_rank()), int(torch.distributed.get_world_size())
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return rank, int(mpu.get_data_parallel_world_size())
    if mpu is not None:
        return rank, num_ranks // int(mpu.get_sequence_parallel_world_size())
    if mesh_device is not None:
        return rank, int(torch.distributed.get_world_size(mesh_device.get_group(mesh_dim="data_parallel")))
    return rank, num_ranks // int(values.get("sequence_parallel_size") or 1)
