"""Sections of a config as the models that scripts import."""

from __future__ import annotations

import pydantic
import pytest

from torsh_distributed.migrate.deepspeed.config.section_models import DeepSpeedFP16Config, DeepSpeedZeroConfig


def test_sections_are_models_with_deepspeeds_defaults() -> None:
    assert DeepSpeedZeroConfig(stage=3, reduce_bucket_size="auto").model_dump()["reduce_bucket_size"] == 500_000_000
    assert DeepSpeedFP16Config(enabled=True).model_dump()["hysteresis"] == 2
    with pytest.raises(pydantic.ValidationError, match="stagee"):
        DeepSpeedZeroConfig(stagee=3)
