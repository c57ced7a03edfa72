"""Accelerate's YAML as a plan: every key that Accelerate knows has a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.config_kinds import translate_config
from torsh_distributed.migrate.launchers.accelerate_config import KEYS, AccelerateConfig

FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, Block
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
use_cpu: false
"""


def test_a_file_that_accelerate_config_writes(tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(FSDP)
    plan, report = translate_config(path, world_size=4, fills={}, version=None)
    assert not report.refused
    assert report.kind == "accelerate"
    assert (plan.fsdp.strategy, plan.precision.dtype, plan.activation.strategy) == ("shard_grad_op", "bf16", "uniform")
    assert plan.fsdp.wrap_classes == ("LlamaDecoderLayer", "Block")
    assert (plan.offload.enabled, plan.offload.optimizer_state, plan.offload.params) == (True, True, True)
    plan.validate(world_size=4)
    assert AccelerateConfig.from_file(path).launch_options() == ["--nproc-per-node", "4"]


def test_degrees_and_compilation() -> None:
    plan, report = AccelerateConfig(
        {
            "distributed_type": "MULTI_GPU",
            "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 4},
            "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"},
            "mixed_precision": False,
        }
    ).to_plan()
    assert (plan.mesh.shard, plan.mesh.tp, plan.compile.enabled, plan.compile.autotune) == (2, 4, True, True)
    plan, _ = AccelerateConfig(
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config": {"megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 8},
        }
    ).to_plan()
    assert (plan.mesh.pp, plan.pipeline.num_microbatches) == (2, 8)
    plan, _ = AccelerateConfig(
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0},
        }
    ).to_plan()
    assert (plan.fsdp.strategy, plan.offload.optimizer_state, plan.offload.params) == ("shard_grad_op", True, False)
    assert plan.training.gradient_clipping == 1.0
    assert not report.refused
    zero3 = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/mnt/disk"}
    plan, report = AccelerateConfig({"distributed_type": "DEEPSPEED", "deepspeed_config": zero3}).to_plan()
    assert (plan.offload.params, plan.offload.disk_dir, plan.fsdp.strategy) == (True, "/mnt/disk", "full_shard")
    assert not report.refused
    with pytest.raises(ConfigurationError, match="offload_param_nvme_path is not given"):
        AccelerateConfig(
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {**zero3, "offload_param_nvme_path": None}}
        ).to_plan()


def test_mistakes_and_other_machines() -> None:
    with pytest.raises(ConfigurationError, match="3 problems"):
        AccelerateConfig({"distributed_type": "MULTI", "num_procesess": 2, "fsdp_config": {"fsdp_wrap": 1}}).to_plan()
    _, report = AccelerateConfig({"distributed_type": "XLA", "tpu_name": "x"}).to_plan()
    assert [entry.key for entry in report.refused] == ["distributed_type", "tpu_name"]


@pytest.mark.needs_library("accelerate")
def test_every_key_of_accelerate_has_its_line() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    sections = {
        "fsdp_config",
        "deepspeed_config",
        "megatron_lm_config",
        "parallelism_config",
        "dynamo_config",
        "fp8_config",
    }
    assert ClusterConfig.__dataclass_fields__.keys() - KEYS.keys() - sections == set()


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    files = {
        "horovod": {"gradient_compression": {"type": "TOP_K"}, "elastic": {"min_workers": 2, "max_workers": 4}},
        "fairscale": {"fsdp": {"mixed_precision": True}, "oss": {"optimizer": "AdamW"}},
        "pytorch": {"ddp": {"bucket_cap_mb": 5}},
        "deepspeed": {"train_batch_size": 8, "zero_optimization": {"stage": 2}},
    }
    for kind, values in files.items():
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(values))
        _, report = translate_config(path, world_size=2, fills={}, version=None)
        assert report.kind == kind
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match="does not look like"):
        translate_config(path, world_size=None, fills={}, version=None)
    with pytest.raises(ConfigurationError, match="did you mean"):
        translate_config(path, kind="fairscales", world_size=None, fills={}, version=None)
