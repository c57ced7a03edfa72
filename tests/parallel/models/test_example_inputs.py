"""What a model's forward is given: no cache for generation in training."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.tiny_transformers import tiny, tiny_batches
from torsh_distributed.parallel.models.example_inputs import keep_no_cache_in_training

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
