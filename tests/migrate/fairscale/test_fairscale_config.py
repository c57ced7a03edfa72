"""FairScale's settings as a plan: every key has a verdict, sizes stay sizes, and plans can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError, IoError
from torsh_distributed.migrate.fairscale import FairScaleConfig
from torsh_distributed.migrate.report import Verdict


def test_fully_sharded_settings_become_fsdp_and_precision() -> None:
    plan, report = FairScaleConfig.from_dict(
        {
            "fsdp": {
                "auto_wrap_policy": "size_based",
                "min_num_params": 5000,
                "mixed_precision": True,
                "compute_dtype": "bfloat16",
                "reshard_after_forward": False,
                "bucket_cap_mb": 25,
            },
            "sharded_grad_scaler": {"init_scale": 1024, "growth_factor": 2.0, "enabled": True},
            "activation_checkpointing": {"strategy": "UNIFORM", "ratio": 0.5},
        }
    ).to_plan()
    assert (plan.fsdp.wrap, plan.fsdp.wrap_min_params, plan.fsdp.strategy) == ("size", 5000, "shard_grad_op")
    assert (plan.precision.dtype, plan.precision.init_loss_scale, plan.mesh.shard) == ("bf16", 1024, -1)
    assert (plan.activation.strategy, plan.activation.every_n_layers) == ("uniform", 2)
    assert report["fsdp.bucket_cap_mb"].verdict is Verdict.HINT
    assert len(report) == 11
    assert not report.refused


@pytest.mark.parametrize("key", ["move_params_to_cpu", "cpu_offload"])
def test_parameters_of_shards_and_of_replicas_are_in_host_memory(key: str) -> None:
    plan, report = FairScaleConfig({"fsdp": {key: True}}).to_plan()
    offload = plan.offload
    assert (offload.enabled, offload.optimizer_state, offload.params, offload.grads) == (True, True, True, True)
    assert plan.fsdp.strategy == "full_shard"
    assert report[f"fsdp.{key}"].verdict is Verdict.HONOURED
    plan.validate(world_size=2)
    replicas, report = FairScaleConfig({"memory": {"parameter_offloading": True}}).to_plan()
    assert (replicas.offload.params, len(report.refused)) == (True, 0)
    replicas.validate(world_size=2)


def test_a_microbatch_size_is_not_taken_for_a_count() -> None:
    config = {"batch_size": 32, "pipeline": {"stages": 2, "micro_batch_size": 4, "schedule": "ONE_F1B"}}
    plan, _ = FairScaleConfig(config).to_plan()
    assert (plan.pipeline.num_microbatches, plan.mesh.pp) == (8, 2)
    _, report = FairScaleConfig({"pipeline": {"stages": 2, "micro_batch_size": 4}}).to_plan()
    assert [entry.key for entry in report.refused] == ["pipeline.micro_batch_size"]
    with pytest.raises(ConfigurationError, match="not a multiple"):
        FairScaleConfig({"batch_size": 30, "pipeline": {"micro_batch_size": 4}}).to_plan()


def test_oss_is_a_sharded_optimizer() -> None:
    plan, report = FairScaleConfig({"oss": {"optimizer": "AdamW", "gradient_predivide_factor": 2.0}}).to_plan()
    assert plan.fsdp.strategy == "shard_optimizer"
    with pytest.raises(ConfigurationError, match="gradient_predivide_factor"):
        report.require_accepted()


def test_files_are_read_and_mistakes_name_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "fairscale.json"
    path.write_text(json.dumps({"fsdp": {"mixed_precison": True, "auto_wrap_policy": "BIG"}, "osss": {}}))
    with pytest.raises(ConfigurationError, match="3 problems") as caught:
        FairScaleConfig.from_file(path).to_plan()
    assert "did you mean mixed_precision?" in str(caught.value)
    with pytest.raises(IoError):
        FairScaleConfig.from_file(tmp_path / "none.json")
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match="not a table"):
        FairScaleConfig.from_file(path)


def test_presets_are_plans() -> None:
    for preset in (FairScaleConfig.default(), FairScaleConfig.fsdp_mixed_precision(), FairScaleConfig.pipelined(2, 8)):
        assert not preset.to_plan()[1].refused
    assert FairScaleConfig.fsdp_mixed_precision().to_plan()[0].precision.dtype == "fp16"
    assert FairScaleConfig.pipelined(2, 8).to_pipeline_config().schedule == "gpipe"
