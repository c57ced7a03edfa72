"""Which models can run on parts of sequences, and why others cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.tiny_transformers import DECODERS, tiny
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.parallel.context.context_check import AttentionFacts, check_context

pytestmark = pytest.mark.needs_library("transformers")


def check(model: nn.Module, *, cp: int = 2, tp: int = 1, form: Any = "auto") -> AttentionFacts:
    return check_context(model, cp=cp, tp=tp, form=form)


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_attention_through_the_registry_can_be_split(name: str) -> None:
    model = tiny(name)
    assert check(model) == AttentionFacts((4,) * 4, 0.0, True)
    assert model.training
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_what_cannot_be_split_is_refused_by_name() -> None:
    for name, message in (
        ("t5", "is an encoder and a decoder with sequences of their own"),
        ("vit", "makes its sequence itself from pixel_values"),
        ("mamba", r"layers\.0 of MambaForCausalLM mixes positions in another way"),
        ("bloom", r"h\.0 of BloomForCausalLM mixes positions in another way"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check(tiny(name))
    with pytest.raises(ConfigurationError, match="load-balancing loss is over the tokens of whole sequences"):
        check(tiny("mixtral", output_router_logits=True))
    with pytest.raises(ConfigurationError, match=r"mesh\.cp 3 does not divide the 4 attention heads"):
        check(tiny("llama"), cp=3, form="ulysses")
    with pytest.raises(ConfigurationError, match=r"2 attention heads of LlamaForCausalLM on each of mesh\.tp 2"):
        check(tiny("llama"), cp=4, tp=2, form="ulysses")
    with pytest.raises(ConfigurationError, match=r"ring attention has no dropout, and GPT2LMHeadModel has 0\.1"):
        check(tiny("gpt2", attn_pdrop=0.1), form="ring")
    assert check(tiny("gpt2", attn_pdrop=0.1)).dropout == pytest.approx(0.1)


def test_a_model_that_counts_positions_itself_is_refused() -> None:
    import transformers

    class Counts(transformers.GPT2LMHeadModel):  # type: ignore[misc]  # untyped
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, attention_mask=attention_mask)

    model = Counts(tiny("gpt2").config)
    with pytest.raises(ConfigurationError, match=r"counts positions itself: what enters transformer\.h\.0"):
        check(model)


def test_an_attention_with_an_argument_of_its_own_is_refused() -> None:
    model = tiny("gpt2")
    before = type(model.transformer.h[0].attn).forward

    def with_bias(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return before(self, hidden, *args, slopes=torch.zeros(4), **kwargs)

    type(model.transformer.h[0].attn).forward = with_bias
    try:
        with pytest.raises(FeatureNotAvailable, match="GPT2Attention takes slopes"):
            check(model)
    finally:
        type(model.transformer.h[0].attn).forward = before
