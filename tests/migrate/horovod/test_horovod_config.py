"""Horovod's settings as a plan: methods keep their meaning, accumulation is kept, fp16 is a cast."""

from __future__ import annotations

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.horovod.horovod_config import HorovodConfig


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"type": "BERNOULLI"}, "bernoulli:0.01"),
        ({"type": "GAUSSIAN", "parameter": 2.0}, "gaussian:2.0"),
        ({"type": "fp16"}, "fp16"),
        ({"type": "QUANTIZATION"}, "nbit:8"),
        ({"type": "TOP_K", "parameter": 0.05, "compression_period": 2}, "topk:0.05"),
    ],
)
def test_every_method_is_itself(given: dict[str, object], method: str) -> None:
    plan, report = HorovodConfig({"gradient_compression": given, "backward_passes_per_step": 4}).to_plan()
    assert plan.compress.method == method
    assert plan.training.gradient_accumulation == 4
    assert not report.refused
    if method == "fp16":
        assert plan.compress.error_feedback == "none"


def test_presets_and_parts() -> None:
    assert HorovodConfig.default().to_ddp_config().max_bucket_size_mb == 64
    assert HorovodConfig.top_k().to_compression_config().name == "topk"
    found = HorovodConfig.elastic(2, 8).to_elastic_config()
    assert (found.enabled, found.min_workers, found.max_workers) == (True, 2, 8)


def test_contradictions_and_unknown_keys() -> None:
    with pytest.raises(ConfigurationError, match="2 problems"):
        HorovodConfig(
            {"backward_passes_per_step": 2, "gradient_accumulation_steps": 3, "optimiser_fusion": {}}
        ).to_plan()
    _, report = HorovodConfig({"elastic": {"discovery_server": "x"}, "custom_ops": ["a"]}).to_plan()
    assert [entry.key for entry in report.refused] == ["elastic.discovery_server", "custom_ops"]
