"""Keys that another key turns off are named, and only those."""

from __future__ import annotations

import pytest

from torsh_distributed.plan import (
    CheckpointConfig,
    Plan,
    PrecisionConfig,
    TensorConfig,
    TrainingConfig,
)
from torsh_distributed.plan.problems import keys_of
from torsh_distributed.plan.support import GATES, KEY_GATES


def test_the_tables_name_existing_keys_and_values() -> None:
    default, keys = Plan(), set(keys_of(Plan))
    for section, (gate, off) in GATES.items():
        assert section in Plan.model_fields
        assert default.value(gate) in off, "a section is off by default"
    for key, (gate, _) in KEY_GATES.items():
        assert {key, gate} <= keys


def test_a_key_that_nothing_turns_off_is_honoured() -> None:
    plan = Plan(dp=2, precision=PrecisionConfig(dtype="bf16"), training=TrainingConfig(gradient_clipping=1.0))
    assert plan.explain()["precision.dtype"].status == "honoured"


def test_a_key_of_a_section_that_is_off_is_said_to_be_off() -> None:
    plan = Plan(tensor=TensorConfig(sequence_parallel=True), checkpoint=CheckpointConfig(keep=2))
    assert plan.explain()["tensor.sequence_parallel"].status == "off by mesh.tp"
    assert plan.explain()["checkpoint.keep"].status == "off by checkpoint.enabled"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"tensor": {"sequence_parallel": True}}, "tensor.sequence_parallel = true has no effect while mesh.tp is 1"),
        ({"pipeline": {"num_microbatches": 8}}, "pipeline.num_microbatches = 8 has no effect while mesh.pp is 1"),
        ({"fsdp": {"strategy": "shard_grad_op"}}, "fsdp.strategy = shard_grad_op has no effect while mesh.shard is 1"),
        (
            {"mesh": {"shard": 2}, "ddp": {"overlap": False}},
            "ddp.overlap = false has no effect while mesh.shard is 2",
        ),
        (
            {"offload": {"cpu_memory_budget_gb": 4.0}},
            "offload.cpu_memory_budget_gb = 4.0 has no effect while offload.enabled is false",
        ),
        (
            {"precision": {"dtype": "bf16", "init_loss_scale": 8.0}},
            "precision.init_loss_scale = 8.0 has no effect while precision.dtype is bf16",
        ),
        (
            {"activation": {"strategy": "selective", "every_n_layers": 2}},
            "activation.every_n_layers = 2 has no effect while activation.strategy is selective",
        ),
        ({"mesh": {"dp": 1, "shard": -1}, "fsdp": {"strategy": "shard_grad_op"}}, None),
        ({"fsdp": {"wrap_names": ["layers.*"]}, "activation": {"strategy": "selective"}}, None),
        ({"tensor": {"sequence_parallel": False}, "pipeline": {"num_microbatches": 4}}, None),
    ],
)
def test_a_setting_that_another_turns_off_is_reported(
    sections: dict[str, dict[str, object]], expected: str | None
) -> None:
    plan = Plan.from_dict(sections)
    assert plan.notices() == (() if expected is None else (expected,))
    plan.validate()


def test_a_saved_plan_gets_no_notices_for_its_defaults() -> None:
    assert Plan.from_dict(Plan(dp=2).to_dict()).notices() == ()


@pytest.mark.parametrize(
    ("sections", "gate", "keeps_buffers"),
    [
        ({"mesh": {"dp": 2}}, None, True),
        ({"mesh": {"shard": 2}}, "mesh.shard", True),
        ({"mesh": {"dp": 1, "shard": -1}, "fsdp": {"strategy": "shard_grad_op"}}, "mesh.shard", True),
        ({"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}}, None, True),
        ({"mesh": {"tp": 2}}, None, True),
        ({"mesh": {"pp": 2}}, "mesh.pp", False),
        ({"offload": {"enabled": True}}, "offload.enabled", True),
        ({"offload": {"enabled": True, "params": False, "grads": False}}, None, True),
    ],
)
def test_bucket_settings_are_said_to_be_off_where_gradients_travel_otherwise(
    sections: dict[str, dict[str, object]], gate: str | None, keeps_buffers: bool
) -> None:
    explained = Plan.from_dict({**sections, "ddp": {"max_bucket_size_mb": 5.0}}).explain()
    expected = "honoured" if gate is None else f"off by {gate}"
    for key in ("ddp.min_bucket_size_mb", "ddp.find_unused_parameters", "ddp.overlap"):
        assert explained[key].status == expected
    # Stages fill buckets once their backward is over.
    fills_buckets = gate in (None, "mesh.pp")
    assert explained["ddp.max_bucket_size_mb"].status == ("honoured" if fills_buckets else expected)
    assert explained["ddp.broadcast_buffers"].status == ("honoured" if keeps_buffers else expected)


def test_the_explanation_has_a_row_for_every_key_and_prints_them() -> None:
    explanation = Plan(dp=2).explain()
    assert [row.key for row in explanation] == list(keys_of(Plan))
    lines = str(explanation).splitlines()
    assert len(lines) == len(keys_of(Plan))
    assert lines[0].split() == ["mesh.dp", "2", "argument", "honoured"]
    with pytest.raises(KeyError):
        explanation["mesh.dq"]
