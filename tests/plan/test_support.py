"""What this version honours: known keys only, and nothing else passes unnoticed."""

from __future__ import annotations

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import (
    CheckpointConfig,
    ElasticConfig,
    Plan,
    PrecisionConfig,
    RetryConfig,
    TensorConfig,
    TrainingConfig,
    support,
)
from torsh_distributed.plan.problems import keys_of
from torsh_distributed.plan.support import GATES, KEY_GATES, NOT_YET


def test_the_tables_name_existing_keys_and_values() -> None:
    default, keys = Plan(), set(keys_of(Plan))
    assert set(NOT_YET) <= keys | set(Plan.model_fields)
    for section, (gate, off) in GATES.items():
        assert section in Plan.model_fields
        assert default.value(gate) in off, "a section is off by default"
    for key, (gate, _) in KEY_GATES.items():
        assert {key, gate} <= keys


def test_the_default_plan_is_supported() -> None:
    assert Plan().unsupported() == ()
    Plan().require_supported()


def test_what_is_honoured_today_is_supported() -> None:
    plan = Plan(dp=2, precision=PrecisionConfig(dtype="bf16"), training=TrainingConfig(gradient_clipping=1.0))
    assert plan.unsupported() == ()
    assert plan.explain()["precision.dtype"].status == "honoured"


@pytest.fixture
def _unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these were not built, whatever is."""
    monkeypatch.setattr(support, "NOT_YET", {"elastic": None, "retry": None})


@pytest.mark.usefixtures("_unbuilt")
def test_what_is_not_built_yet_is_refused_by_name() -> None:
    plan = Plan(retry=RetryConfig(jitter=0.0), elastic=ElasticConfig(enabled=True))
    assert plan.unsupported() == ("elastic.enabled", "retry.jitter")
    assert plan.explain()["retry.jitter"].status == "not yet"
    with pytest.raises(ConfigurationError) as caught:
        plan.require_supported()
    assert str(caught.value).splitlines()[:3] == [
        "plan has 2 problems:",
        "  elastic.enabled = true is not supported by this version yet (leave it at its default, false)",
        "  retry.jitter = 0.0 is not supported by this version yet (leave it at its default, 0.1)",
    ]


@pytest.mark.usefixtures("_unbuilt")
def test_a_key_of_a_section_that_is_off_is_said_to_be_off() -> None:
    plan = Plan(tensor=TensorConfig(sequence_parallel=True), checkpoint=CheckpointConfig(keep=2))
    assert plan.explain()["tensor.sequence_parallel"].status == "off by mesh.tp"
    assert plan.explain()["checkpoint.keep"].status == "off by checkpoint.enabled"
    assert plan.unsupported() == ()
    assert Plan(elastic=ElasticConfig(enabled=True)).unsupported() == ("elastic.enabled",)


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


@pytest.mark.usefixtures("_unbuilt")
def test_retrying_is_not_configurable_and_says_so() -> None:
    plan = Plan.from_dict({"retry": {"max_retries": 7}})
    assert plan.unsupported() == ("retry.max_retries",)
    with pytest.raises(ConfigurationError, match=r"retry\.max_retries = 7 is not supported"):
        plan.require_supported()


@pytest.mark.usefixtures("_unbuilt")
def test_validate_tells_support_and_world_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plan(dp=2, tp=2, retry=RetryConfig(jitter=0.0)).validate(6)
    assert str(caught.value).splitlines()[1:3] == [
        "  retry.jitter = 0.0 is not supported by this version yet (leave it at its default, 0.1)",
        (
            "  dp 2 × tp 2 × pp 1 = 4, but the world has 6 ranks"
            " (start 4 ranks, or set one degree of [mesh] to -1 to fill the world)"
        ),
    ]
    Plan(dp=2).validate()
    Plan(dp=2).validate(2)


def test_the_explanation_has_a_row_for_every_key_and_prints_them() -> None:
    explanation = Plan(dp=2).explain()
    assert [row.key for row in explanation] == list(keys_of(Plan))
    lines = str(explanation).splitlines()
    assert len(lines) == len(keys_of(Plan))
    assert lines[0].split() == ["mesh.dp", "2", "argument", "honoured"]
    with pytest.raises(KeyError):
        explanation["mesh.dq"]
