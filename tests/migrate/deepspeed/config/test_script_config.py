"""`deepspeed.DeepSpeedConfig` as scripts read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config import section_models as models
from torsh_distributed.migrate.deepspeed.config.script_config import ScriptConfig


def test_attributes_are_those_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "fp16": {"enabled": True, "initial_scale_power": 8},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                    "allgather_bucket_size": 2e8,
                },
                "flops_profiler": {"enabled": True, "profile_step": 3},
                "checkpoint": {"tag_validation": "Fail"},
            }
        )
    )
    config = ScriptConfig(str(path))
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
    assert (config.gradient_accumulation_steps, config.world_size, config.global_rank) == (2, 1, 0)
    read: Any = config
    assert read.zero_config.stage == models.ZeroStageEnum.gradients
    assert read.zero_config.offload_optimizer.device == "cpu"
    assert read.zero_config.offload_param is None
    assert read.zero_config.allgather_bucket_size == 200_000_000
    assert read.zero_config.param_persistence_threshold == 100_000
    assert read.zero_config.overlap_comm is False
    assert (read.zero_enabled, read.zero_optimization_stage) == (True, 2)
    assert (read.fp16_enabled, read.bfloat16_enabled, read.initial_dynamic_scale) == (True, False, 256)
    assert (read.float16_config.enabled, read.float16_config.hysteresis) == (True, 2)
    assert (read.optimizer_name, read.optimizer_params) == ("adamw", {"lr": 1e-3})
    assert (read.scheduler_name, read.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 5})
    assert (read.gradient_clipping, read.steps_per_print, read.prescale_gradients) == (1.0, None, False)
    assert (read.wall_clock_breakdown, read.flops_profiler_config.profile_step) == (True, 3)
    assert (read.checkpoint_tag_validation_enabled, read.checkpoint_tag_validation_fail) == (True, True)
    assert read.monitor_config.tensorboard.enabled is False


class _Ranks:
    """What Megatron passes as `mpu`."""

    @staticmethod
    def get_data_parallel_world_size() -> int:
        return 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, (8, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (6, 2, 3)),
        ({"train_batch_size": 8}, (8, 8, 1)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, None),
        ({"gradient_accumulation_steps": 3}, None),
        ({}, None),
    ],
)
def test_batch_sizes_are_resolved_or_an_assertion(sizes: dict[str, int], expected: tuple[int, int, int] | None) -> None:
    if expected is None:
        with pytest.raises(AssertionError, match="batch"):
            ScriptConfig(sizes, _Ranks())
        return
    config = ScriptConfig(sizes, _Ranks())
    found = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert found == expected


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, AssertionError, "cannot be simultaneously enabled"),
        (
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
            ValueError,
            "not supported with ZeRO stage 3",
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, AssertionError, "only supported with ZeRO"),
        ({"zero_optimization": {"stage": 2, "grad_hooks": True}}, ConfigurationError, "grad_hooks is not a key"),
    ],
)
def test_what_deepspeed_refuses_is_refused(keys: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ScriptConfig({"train_batch_size": 8, **keys})


def test_old_keys_and_auto_are_taken() -> None:
    read: Any = ScriptConfig(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "stage3_gather_fp16_weights_on_model_save": True,
                "reduce_bucket_size": "auto",
            },
            "steps_per_print": float("inf"),
            "my_own_key": {"anything": 1},
        }
    )
    assert read.zero_config.offload_optimizer.device is models.OffloadDeviceEnum.cpu
    assert read.zero_config.gather_16bit_weights_on_model_save is True
    assert (read.zero_config.reduce_bucket_size, read.zero_config.overlap_comm) == (500_000_000, True)
    assert (read.bfloat16_enabled, read.steps_per_print) == (False, None)


def test_a_section_checks_its_values() -> None:
    made: Any = models.DeepSpeedZeroConfig(stage3_max_live_parameters=7)
    assert made.max_live_parameters == 7
    for values in ({"stage": 5}, {"reduce_bucket_size": -1}, {"offload_param": {"device": "tape"}}, {"stagee": 1}):
        with pytest.raises(ValidationError):
            models.DeepSpeedZeroConfig(**values)
