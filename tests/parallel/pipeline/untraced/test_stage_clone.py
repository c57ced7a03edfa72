"""Stages that keep the model's forward: together they are the model, apart they hold only their own layers."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.tiny_transformers import DECODERS, tiny, tiny_batches
from torsh_distributed.parallel.pipeline import split_into_stages

pytestmark = pytest.mark.needs_library("transformers")


@pytest.mark.parametrize("name", [*DECODERS, "bert", "vit"])
def test_the_stages_together_are_the_model(name: str) -> None:
    model = tiny(name)
    batch = tiny_batches(name, 1, padded=name != "vit")[0]
    expected = model(**batch)
    plan = split_into_stages(model, 4)
    plan.microbatches.load(batch, None, 1)
    values: tuple[torch.Tensor, ...] = ()
    for stage in plan.stages:
        built = plan.build(stage.index)
        values = (built(*values),)
    output = built.forward_of_model.restored(values[0])
    assert type(output) is type(expected)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    names = set().union(*(plan.names(stage.index) for stage in plan.stages))
    assert {name for name, _ in model.named_parameters()} <= names
    assert all(param.grad is not None for param in model.parameters())


def test_stages_hold_their_own_layers_only() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    plan = split_into_stages(model, 2)
    plan.drop_others([1])
    assert {param.device.type for param in plan.build(0).parameters()} == {"meta"}
    last = plan.build(1)
    assert {param.device.type for param in last.parameters()} == {"cpu"}
    assert next(name for name, _ in last.named_parameters()) == "model.layers.2.self_attn.q_proj.weight"
    model.eval()
    last.eval()
    assert not last.forward_of_model.model.model.training
