"""Old names of keys: accepted in files, with a notice."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from torsh_distributed.deprecation import notice
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan


@pytest.mark.parametrize(
    ("old", "value", "expected"),
    [
        ("mesh.data_parallel_size", 2, {"mesh.dp": 2}),
        ("mesh.tensor_parallel_size", 2, {"mesh.tp": 2}),
        ("mesh.pipeline_parallel_size", 2, {"mesh.pp": 2}),
        ("mesh.memory_optimization", "standard", {"activation.strategy": "selective"}),
        (
            "mesh.memory_strategy",
            "EXTREME",
            {"activation.strategy": "uniform", "activation.every_n_layers": 1, "activation.offload_to_cpu": True},
        ),
        ("mesh.communication_strategy", "ring_all_reduce", {"distributed.algorithm": "ring"}),
        ("ddp.bucket_size_mb", 10, {"ddp.max_bucket_size_mb": 10.0}),
        ("ddp.overlap_communication", False, {"ddp.overlap": False}),
        ("ddp.gradient_accumulation_steps", 4, {"training.gradient_accumulation": 4}),
        ("fsdp.enable_forward_prefetch", True, {"fsdp.forward_prefetch": True}),
        ("fsdp.enable_backward_prefetch", False, {"fsdp.backward_prefetch": "none"}),
        ("pipeline.num_micro_batches", 8, {"pipeline.num_microbatches": 8}),
        ("offload.offload_optimizer_state", False, {"offload.optimizer_state": False}),
        ("offload.offload_parameters", False, {"offload.params": False}),
        ("offload.compression_method", "fp16", {"offload.cpu_compression": "fp16"}),
        ("offload.memory_strategy", "extreme", {"offload.auto_memory_management": "extreme"}),
        ("checkpoint.checkpoint_interval", 5, {"checkpoint.every_steps": 5}),
        ("checkpoint.max_checkpoints_to_keep", 2, {"checkpoint.keep": 2}),
        ("checkpoint.verify_integrity", False, {"checkpoint.verify_after_save": False}),
        ("checkpoint.enable_compression", True, {"checkpoint.compression_level": 3}),
        ("checkpoint.save_best", False, {"checkpoint.keep_best": 0}),
        ("checkpoint.max_time_between_checkpoints_sec", 60, {"checkpoint.every_s": 60.0}),
        ("checkpoint.max_time_between_checkpoints_s", 60, {"checkpoint.every_s": 60.0}),
        ("checkpoint.checkpoint_frequency", 5, {"checkpoint.every_steps": 5}),
        ("checkpoint.max_checkpoints", 2, {"checkpoint.keep": 2}),
        ("checkpoint.checkpoint_dir", "there", {"checkpoint.dir": "there"}),
        ("offload.offload_params", False, {"offload.params": False}),
        ("offload.offload_grads", False, {"offload.grads": False}),
        ("offload.offload_optimizer_states", False, {"offload.optimizer_state": False}),
        ("compress.compression_period", 2, {"compress.period": 2}),
        ("expert.expert_dropout", 0.5, {"expert.dropout": 0.5}),
        ("ddp.enabled", False, {"ddp.bucketing": False}),
        ("distributed.timeout", 20, {"distributed.timeout_s": 20.0}),
        ("retry.initial_delay_ms", 250, {"retry.initial_delay_s": 0.25}),
        ("elastic.heartbeat_timeout_us", 500000, {"elastic.heartbeat_timeout_s": 0.5}),
        ("elastic.heartbeat_timeout_secs", 5, {"elastic.heartbeat_timeout_s": 5.0}),
    ],
)
def test_an_old_name_is_accepted_with_a_notice(
    caplog: pytest.LogCaptureFixture, old: str, value: object, expected: dict[str, object]
) -> None:
    section, _, key = old.partition(".")
    with caplog.at_level(logging.WARNING, logger="torsh_distributed.plan"):
        plan = Plan.from_dict({section: {key: value}})
    assert {difference.key: difference.mine for difference in plan.diff(Plan())} == expected
    assert caplog.messages == [f"argument: {notice('plan keys', old, ' and '.join(expected))}"]
    assert plan.explain()[next(iter(expected))].source == f"argument, as {old}"


def test_a_wrong_value_under_an_old_name_is_refused_under_the_new_one() -> None:
    with pytest.raises(ConfigurationError, match=r"activation\.strategy must be one of none, .*; got 'huge'"):
        Plan.from_dict({"mesh": {"memory_strategy": "huge"}})
    with pytest.raises(ConfigurationError, match=r"retry\.max_delay_s must be a number, at least 0; got 'soon'"):
        Plan.from_dict({"retry": {"max_delay_ms": "soon"}})


@pytest.mark.parametrize("document", [{"mesh": {"dp": 2, "dp_size": 3}}, {"mesh": {"dp_size": 3, "dp": 2}}])
def test_both_names_of_one_key_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.dp_size and mesh\.dp are both given, and mean the same"):
        Plan.from_dict(document)
    with pytest.raises(ConfigurationError, match=r"mesh\.data_parallel_size and mesh\.dp are both given"):
        Plan.from_dict({"mesh": {"dp_size": 2, "data_parallel_size": 2}})


def test_old_names_belong_to_files_not_to_arguments() -> None:
    with pytest.raises(ConfigurationError, match="dp_size is not a key"):
        Plan().replace(mesh={"dp_size": 2})
