"""Models that cannot be spread as asked are named, with what would work, before anything is changed.

Others of this kind: heads that do not divide (`tensor/planning`), layers that are no chain (`pipeline/untraced`),
attention outside the registry (`context`), padding (`composed/test_transformers_models`), weights that do not fit
(`weights`) and graphs that break (`test_compiling`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.models.zoo import quiet_imports
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.context.context_check import check_context
from torsh_distributed.parallel.pipeline import split_into_stages
from torsh_distributed.parallel.tensor import SplitStyle, find_tensor_plan


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight + self.weight.mean(), self.bias)


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Doubled(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))

    def torsh_anatomy(self) -> dict[str, object]:
        return {"tensor_plan": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}}


def test_a_layer_that_cannot_be_split_is_named() -> None:
    for device in ("cpu", "meta"):  # a model that gets its values later is split before
        with torch.device(device):
            model = Doubles()
        with pytest.raises(ConfigurationError, match=r"blocks\.0\.0: Doubled computes its forward by itself") as caught:
            find_tensor_plan(model, tp=2)
        assert "tensor.overrides blocks.0.0=replicated" in str(caught.value.hint)


class Dynamic(nn.Module):
    """Leaves when a value is large: no two ranks need agree on how far to go."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if float(x.abs().max()) > 0.0:
                break
        return x


def test_control_flow_that_depends_on_values_is_named() -> None:
    with pytest.raises(ConfigurationError, match="could not be traced"):
        split_into_stages(Dynamic(), 2)
    with pytest.raises(ConfigurationError, match=r"layers\.1 did not run"):
        split_into_stages(Dynamic(), 2, example=(torch.ones(1, 4),))


def remote_model() -> nn.Module:
    """A model as the code beside a checkpoint defines it: transformers' conventions, attention of its own, no plan."""
    with quiet_imports():
        from transformers import GPT2Config, PreTrainedModel
        from transformers.modeling_outputs import CausalLMOutput

    class RemoteAttention(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_heads = config.n_head
            self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            self.v_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, hidden: Tensor) -> Tensor:
            parts = [one(hidden) for one in (self.q_proj, self.k_proj, self.v_proj)]
            heads = [one.unflatten(2, (-1, 8)).transpose(1, 2) for one in parts]
            mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
            out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
            return out

    class RemoteBlock(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.attention = RemoteAttention(config)

        def forward(self, hidden: Tensor) -> Tensor:
            out: Tensor = hidden + self.attention(hidden)
            return out

    class RemoteForCausalLM(PreTrainedModel):  # type: ignore[misc]  # untyped
        config_class = GPT2Config
        _no_split_modules = ("RemoteBlock",)
        __module__ = "transformers_modules.somebody.modeling_remote"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embed = nn.Embedding(config.vocab_size, 32)
            self.blocks = nn.ModuleList(RemoteBlock(config) for _ in range(2))
            self.head = nn.Linear(32, config.vocab_size)
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            hidden = self.embed(input_ids)
            for block in self.blocks:
                hidden = block(hidden)
            return CausalLMOutput(logits=self.head(hidden))

    return RemoteForCausalLM(GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=2))


@pytest.mark.needs_library("transformers")
def test_a_model_of_remote_code_is_split_by_its_structure_or_named() -> None:
    model = remote_model()
    assert find_tensor_plan(model, tp=2).style_of("blocks.0.attention.o_proj") is SplitStyle.ROW
    assert len(split_into_stages(model, 2).stages) == 2
    with pytest.raises(ConfigurationError, match=r"blocks\.0 of RemoteForCausalLM mixes positions in another way"):
        check_context(model, cp=2, tp=1, form="auto")
