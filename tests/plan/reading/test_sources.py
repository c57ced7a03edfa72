"""Where values come from: precedence, sources, and texts of the environment and the command line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan, TrainingConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text("[mesh]\ndp = 2\n[training]\nsteps = 10\nseed = 1\nbatch_size = 8\n")
    return path


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(file: Path) -> None:
    environ = {"TORSH_PLAN__TRAINING__STEPS": "20", "TORSH_PLAN__TRAINING__SEED": "2", "PATH": "/bin"}
    plan = Plan.compose(file, environ=environ, command_line=["training.seed=3"])
    assert plan.training == TrainingConfig(batch_size=8, steps=20, seed=3)
    rows = plan.explain()
    assert rows["training.batch_size"].source == f"file {file}"
    assert rows["training.steps"].source == "environment TORSH_PLAN__TRAINING__STEPS"
    assert rows["training.seed"].source == "command line"
    assert rows["training.log_every"].source == "default"


def test_an_argument_beats_them_all(file: Path) -> None:
    plan = Plan.compose(file, command_line=["training.seed=3"]).replace(training={"seed": 4})
    assert plan.training.seed == 4
    assert plan.explain()["training.seed"].source == "argument"
    assert plan.explain()["training.steps"].source == f"file {file}"
    assert Plan(dp=2).explain()["mesh.dp"].source == "argument"
    # A section replaced whole keeps nothing of the old one, its sources included.
    assert plan.replace(training=TrainingConfig(seed=5)).explain()["training.steps"].source == "default"


def test_the_environment_names_a_file_and_changes_its_keys(file: Path) -> None:
    plan = Plan.from_env({"TORSH_PLAN": str(file), "TORSH_PLAN__MESH__DP": "4"})
    assert (plan.mesh.dp, plan.training.steps) == (4, 10)
    assert Plan.from_env({}) == Plan()
    assert Plan.from_env({"TORSH_PLAN": ""}) == Plan()


def test_a_file_given_by_name_beats_the_one_of_the_environment(file: Path) -> None:
    assert Plan.compose(file, environ={"TORSH_PLAN": "absent.toml"}).mesh.dp == 2


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("training.steps", "7", 7),
        ("training.learning_rate", "1e-4", 1e-4),
        ("training.learning_rate", "1", 1.0),
        ("training.gradient_clipping", "0.5", 0.5),
        ("ddp.static_graph", "true", True),
        ("fsdp.wrap_classes", '["Block", "Head"]', ("Block", "Head")),
        ("precision.dtype", "bf16", "bf16"),
        ("checkpoint.dir", "2024", "2024"),
        ("observe.events_dir", "/tmp/a=b", "/tmp/a=b"),
    ],
)
def test_text_is_read_as_the_key_wants_it(key: str, text: str, value: Any) -> None:
    variable = "TORSH_PLAN__" + key.replace(".", "__").upper()
    for plan in (Plan.from_env({variable: text}), Plan.compose(command_line=[f"{key}={text}"])):
        assert plan.value(key) == value
        assert type(plan.value(key)) is type(value)


@pytest.mark.parametrize(
    ("environ", "command_line", "message"),
    [
        (
            {"TORSH_PLAN__TRAINING__STEPS": "many"},
            [],
            (
                "plan: training.steps must be an integer, at least 1; got 'many'"
                " (from environment TORSH_PLAN__TRAINING__STEPS)"
            ),
        ),
        (
            {"TORSH_PLAN__MESH__DPP": "2"},
            [],
            "plan: mesh.dpp is not a key of [mesh] (from environment TORSH_PLAN__MESH__DPP)",
        ),
        ({"TORSH_PLAN__MESH": "2"}, [], "plan: environment TORSH_PLAN__MESH: mesh does not name a key"),
        ({}, ["dp=2"], "plan: command line: dp does not name a key"),
        ({}, ["=2"], "plan: command line: nothing does not name a key"),
        (
            {},
            ["training.steps=2\nseed = 3"],
            "plan: training.steps must be an integer, at least 1; got '2\\nseed = 3' (from command line)",
        ),
    ],
)
def test_a_bad_text_names_its_variable_or_the_command_line(
    environ: dict[str, str], command_line: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plan.compose(environ=environ, command_line=command_line)
    assert caught.value.message == message


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
        ("checkpoint.enable_compression", False, {"checkpoint.compression_level": 0}),
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
    assert caplog.messages == [f"argument: {old} is accepted for {' and '.join(expected)}; please write the latter"]
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
