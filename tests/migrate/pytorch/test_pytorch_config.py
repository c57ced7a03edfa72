"""torch's own keywords as a plan: objects or names, every one with a verdict, none forgotten."""

from __future__ import annotations

import functools
import inspect
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks, powerSGD_hook
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.pytorch import PyTorchConfig, from_torch
from torsh_distributed.migrate.pytorch.fsdp_keywords import FSDP1_KEYWORDS, FULLY_SHARD_KEYWORDS
from torsh_distributed.migrate.pytorch.hook_keywords import DDP_KEYWORDS, GROUP_KEYWORDS, HOOKS, SCALER_KEYWORDS
from torsh_distributed.migrate.report import Verdict


def values(plan: Any, *keys: str) -> list[Any]:
    return [plan.value(key) for key in keys]


@pytest.mark.parametrize(
    ("called", "table"),
    [
        (nn.parallel.DistributedDataParallel.__init__, DDP_KEYWORDS),
        (torch_fsdp.FullyShardedDataParallel.__init__, FSDP1_KEYWORDS),
        (torch_fsdp.fully_shard, FULLY_SHARD_KEYWORDS),
        (torch.amp.GradScaler.__init__, SCALER_KEYWORDS),
        (torch.distributed.init_process_group, GROUP_KEYWORDS),
    ],
)
def test_every_keyword_of_torch_has_its_line(called: Any, table: dict[str, Any]) -> None:
    names = {name for name in inspect.signature(called).parameters if not name.startswith("_")}
    assert names - table.keys() - {"self", "module"} == set()


def test_every_hook_of_torch_has_its_line() -> None:
    names = {name for name, one in inspect.getmembers(default_hooks, inspect.isfunction) if not name.startswith("_")}
    assert names - HOOKS.keys() - {"cast"} == set()
    for member in DDPCommHookType:
        from_torch(comm_hook={"hook": member})


def test_ddp_and_its_hooks() -> None:
    plan, report = from_torch(
        init_process_group={"backend": "nccl", "timeout": timedelta(minutes=2), "init_method": "env://"},
        ddp={
            "device_ids": [0],
            "bucket_cap_mb": 10,
            "static_graph": True,
            "broadcast_buffers": False,
            "init_sync": True,
        },
        comm_hook={
            "hook": powerSGD_hook.powerSGD_hook,
            "state": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 10, "use_error_feedback": False},
        },
    )
    found = values(plan, "distributed.backend", "distributed.timeout_s", "ddp.max_bucket_size_mb", "ddp.static_graph")
    assert found == ["nccl", 120.0, 10.0, True]
    found = values(plan, "ddp.broadcast_buffers", "compress.method", "compress.warmup_steps", "compress.error_feedback")
    assert found == [False, "powersgd:2", 10, "none"]
    assert report["ddp.device_ids"].verdict is Verdict.EQUIVALENT
    assert not report.refused
    assert values(from_torch(comm_hook={"hook": default_hooks.fp16_compress_hook})[0], "compress.method") == ["fp16"]


def test_fsdp1_objects_and_their_names_mean_the_same() -> None:
    given: dict[str, Any] = {
        "sharding_strategy": torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
        "cpu_offload": torch_fsdp.CPUOffload(offload_params=True),
        "mixed_precision": torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_POST,
        "auto_wrap_policy": ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        "ignored_modules": ["embedding"],
        "sync_module_states": True,
        "device_id": 0,
    }
    named: dict[str, Any] = {
        **given,
        "sharding_strategy": "SHARD_GRAD_OP",
        "cpu_offload": {"offload_params": True},
        "mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "torch.float32"},
        "backward_prefetch": "BackwardPrefetch.BACKWARD_POST",
        "auto_wrap_policy": {"policy": "transformer", "transformer_layer_cls": ["TransformerEncoderLayer"]},
    }
    plan, report = from_torch(fsdp=given)
    assert plan == from_torch(fsdp=named)[0]
    found = values(plan, "fsdp.strategy", "offload.params", "precision.dtype", "precision.reduce_dtype", "mesh.shard")
    assert found == ["shard_grad_op", True, "bf16", "fp32", -1]
    found = values(plan, "fsdp.backward_prefetch", "fsdp.wrap_classes", "fsdp.ignored_modules")
    assert found == ["backward_post", ("TransformerEncoderLayer",), ("embedding",)]
    assert not report.refused
    assert report["fsdp.cpu_offload"].verdict is Verdict.HONOURED
    plan.validate(world_size=4)
    replicas, report = from_torch(fsdp={"cpu_offload": True, "sharding_strategy": "NO_SHARD"})
    assert (replicas.offload.params, replicas.offload.optimizer_state, len(report.refused)) == (True, True, 0)
    replicas.validate(world_size=4)
    sized = functools.partial(size_based_auto_wrap_policy, min_num_params=500)
    plan, _ = from_torch(fsdp={"auto_wrap_policy": sized, "sharding_strategy": None})
    assert values(plan, "fsdp.wrap", "fsdp.wrap_min_params", "fsdp.strategy") == ["size", 500, "full_shard"]
    assert values(from_torch(fsdp={"sharding_strategy": "NO_SHARD"})[0], "mesh.dp", "mesh.shard") == [-1, 1]


def test_what_a_plan_cannot_hold_is_refused_with_what_to_write() -> None:
    _, report = from_torch(
        fsdp={"ignored_modules": [nn.Linear(1, 1)], "auto_wrap_policy": lambda **_: True, "device_mesh": None},
        pipe={"chunks": 4, "deferred_batch_norm": True, "checkpoint": "always", "stages": 2},
        cudnn={"benchmark": True, "deterministic": True},
        nccl={"NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1"},
        grad_scaler={"growth_factor": 3.0, "init_scale": 1024},
    )
    refused = [entry.key for entry in report.refused]
    assert refused == [
        "fsdp.ignored_modules",
        "fsdp.auto_wrap_policy",
        "pipe.deferred_batch_norm",
        "grad_scaler.growth_factor",
    ]
    assert all(entry.reason for entry in report.refused)
    assert report["nccl.NCCL_DEBUG"].verdict is Verdict.HONOURED


def test_fully_shard() -> None:
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.float16, cast_forward_inputs=True)
    plan, report = from_torch(
        fully_shard={
            "reshard_after_forward": False,
            "mp_policy": policy,
            "offload_policy": torch_fsdp.CPUOffloadPolicy(),
            "shard_placement_fn": None,
        }
    )
    found = values(plan, "fsdp.strategy", "precision.dtype", "offload.enabled")
    assert found == ["shard_grad_op", "fp16", True]
    assert not report.refused
    assert plan.offload.params
    plan.validate(world_size=2)


def test_files_and_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "torch.json"
    path.write_text(json.dumps({"ddp": {"bucket_cap": 3}, "fsdp": {"sharding_strategy": "HALF"}, "dpp": {}}))
    with pytest.raises(ConfigurationError, match="4 problems") as caught:
        PyTorchConfig.from_file(path).to_plan()
    for text in ("did you mean bucket_cap_mb?", "FULL_SHARD", "keep one of them", "did you mean"):
        assert text in str(caught.value)
    path.write_text("[1]")
    with pytest.raises(ConfigurationError, match="not a table"):
        PyTorchConfig.from_file(path)
