"""Chains of layers found by running a model once, and models whose layers are no chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.tiny_transformers import tiny
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.anatomy import anatomy_of
from torsh_distributed.parallel.models.example_inputs import example_inputs
from torsh_distributed.parallel.pipeline import split_into_stages
from torsh_distributed.parallel.pipeline.untraced.layer_chain import LayerChain, find_chain, measure_chain

pytestmark = pytest.mark.needs_library("transformers")


def chain_of(model: nn.Module, example: Any = None) -> LayerChain:
    return find_chain(model, anatomy_of(model).layers, example_inputs(model, example))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("llama", ("model.embed_tokens",), ("model.norm", "lm_head")),
        ("gpt2", ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")),
        ("bert", ("bert.embeddings",), ("cls",)),
        ("vit", ("vit.embeddings",), ("vit.layernorm", "classifier")),
        (
            "opt",
            ("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
            ("model.decoder.project_out", "model.decoder.final_layer_norm", "lm_head"),
        ),
    ],
)
def test_what_runs_around_the_layers_is_found_whatever_its_name(
    name: str, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    model = tiny(name)
    found = chain_of(model)
    assert (set(found.before), set(found.after)) == (set(before), set(after))
    assert len(found.layers) == 4
    assert model.training
    times = measure_chain(model, found, repeats=1)
    assert len(times) == 4
    assert min(times) > 0


class Custom(nn.Module):
    """Layers in a list, and a forward that no tracer follows; what else it does is for subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 10)

    def between(self, hidden: Tensor, start: Tensor) -> Tensor:
        return hidden

    def forward(self, ids: Tensor, *, scale: float = 1.0, **more: Any) -> Tensor:
        hidden = start = self.embed(ids)
        for layer in self.layers:
            hidden = self.between(layer(hidden), start)
            if float(hidden.sum()) > 1e9:
                break
        return self.head(hidden) * scale


class AddsTheEmbedding(Custom):
    def between(self, hidden: Tensor, start: Tensor) -> Tensor:
        return hidden + start


class HasANormBetween(Custom):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def between(self, hidden: Tensor, start: Tensor) -> Tensor:
        return self.norm(hidden)


class ReadsAParameter(Custom):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def between(self, hidden: Tensor, start: Tensor) -> Tensor:
        return hidden + self.shift


class RepeatsLayers(Custom):
    def forward(self, ids: Tensor, *, scale: float = 1.0, **more: Any) -> Tensor:
        hidden = self.embed(ids)
        for layer in [*self.layers, self.layers[0]]:
            hidden = layer(hidden)
        return self.head(hidden) * (scale if float(hidden.sum()) < 1e9 else 0.0)


class LeavesOneOut(Custom):
    def forward(self, ids: Tensor, *, scale: float = 1.0, **more: Any) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers[:2]:
            hidden = layer(hidden)
        return self.head(hidden) * (scale if float(hidden.sum()) < 1e9 else 0.0)


class UsesItsEmbeddingTwice(Custom):
    """The head is the embedding's table, read by the forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, ids: Tensor, *, scale: float = 1.0, **more: Any) -> Tensor:
        return super().forward(ids, scale=scale) @ self.embed.weight.T


EXAMPLE = (torch.tensor([[1, 2, 3]]),)


def test_a_model_that_cannot_be_traced_needs_an_example() -> None:
    with pytest.raises(ConfigurationError, match=r"could not be traced(?s:.)*pass example="):
        split_into_stages(Custom(), 3)
    plan = split_into_stages(Custom(), 3, example=EXAMPLE)
    assert [stage.layers for stage in plan.stages] == [("embed", "layers.0"), ("layers.1",), ("layers.2", "head")]
    tied = split_into_stages(UsesItsEmbeddingTwice(), 3, example=EXAMPLE)
    assert tied.tied == (((0, "embed.weight"), (2, "embed.weight")),)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (AddsTheEmbedding, "do not compute what the model computes"),
        (HasANormBetween, "norm of HasANormBetween has parameters and runs between the layers"),
        (ReadsAParameter, "reads the parameter shift itself before its last layer"),
        (RepeatsLayers, r"the layer layers\.0 of RepeatsLayers runs more than once"),
        (LeavesOneOut, r"layers\.2 did not run"),
    ],
)
def test_layers_that_are_no_chain_are_refused_by_name(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_into_stages(kind(), 2, example=EXAMPLE)


def test_models_of_transformers_that_have_no_stages_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"is an encoder and a decoder(?s:.)*mesh\.tp"):
        split_into_stages(tiny("t5"), 2)
    with pytest.raises(ConfigurationError, match=r"leaves out layers at random \(layerdrop 0.1\)"):
        split_into_stages(tiny("opt", layerdrop=0.1), 2)
    with pytest.raises(ConfigurationError, match="output_router_logits = True"):
        split_into_stages(tiny("mixtral", output_router_logits=True), 2)
    with pytest.raises(ConfigurationError, match="8 stages need as many layers, but the model has 4"):
        split_into_stages(tiny("llama"), 8)
