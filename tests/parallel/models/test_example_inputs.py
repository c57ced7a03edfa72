"""What a model's forward is given: no cache for generation in training, an example to compare it on."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.tiny_transformers import tiny, tiny_batches
from torsh_distributed.parallel.composed.build import _split_check
from torsh_distributed.parallel.models.example_inputs import example_inputs, keep_no_cache_in_training
from torsh_distributed.plan import MeshConfig, Plan

pytestmark = pytest.mark.needs_library("transformers")


def test_a_model_that_trains_keeps_no_keys_unless_it_is_asked_to() -> None:
    model = tiny("llama")
    batch = tiny_batches("llama", 1)[0]
    assert model(**batch).past_key_values is not None, "transformers' default"
    keep_no_cache_in_training(model)
    assert model(**batch).past_key_values is None
    assert model(**batch, use_cache=True).past_key_values is not None
    with torch.no_grad():
        assert model.eval()(**batch).past_key_values is not None


def test_an_encoder_with_a_decoder_is_compared_when_it_is_split() -> None:
    model = tiny("t5")
    example = example_inputs(model)
    assert example["decoder_input_ids"].shape == example["input_ids"].shape
    assert torch.isfinite(model(**example).logits).all()
    assert _split_check(model, Plan(mesh=MeshConfig(tp=2)), None) is not None
    assert "decoder_input_ids" not in example_inputs(tiny("llama"))
