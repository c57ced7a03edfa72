"""Inputs and layers of users' own models: traced as they are used, or refused in a sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.planner.model.model_profile import ModelProfile
from torsh_distributed.planner.model.profiling import profile_model


class OfBatch(nn.Module):
    """Takes a batch as one argument, whatever is in it."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.layer = nn.Linear(8, 8)

    @override
    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.layer(self.read(batch))
        return out


def forward_flops(profile: ModelProfile, num_samples: int) -> float:
    return sum(part.forward_flops.at(num_samples) for part in (profile.before, *profile.chain(), profile.after))


@pytest.mark.parametrize(
    ("read", "batch"),
    [
        (lambda batch: batch["rows"] * batch["scale"], {"rows": torch.zeros(2, 8), "scale": 0.5}),
        (lambda batch: batch[0] + batch[1]["more"], [torch.zeros(2, 8), {"more": torch.zeros(2, 8)}]),
        (lambda batch: batch["rows"] * batch["mask"], {"rows": torch.zeros(2, 8), "mask": torch.ones(8)}),
        (lambda batch: batch["rows"] * batch["scale"], {"rows": torch.zeros(2, 8), "scale": torch.tensor(2.0)}),
    ],
)
def test_tensors_inside_an_argument_grow_with_the_samples_and_shared_ones_do_not(read: Any, batch: Any) -> None:
    assert forward_flops(profile_model(OfBatch(read), example=(batch,)), 5) == 5 * 2 * 8 * 8


def test_a_mask_that_all_samples_share_is_given_as_it_is() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        @override
        def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.layer(rows * mask)
            return out

    assert forward_flops(profile_model(Masked(), example=(torch.zeros(2, 8), torch.ones(8))), 5) == 5 * 2 * 8 * 8


def test_an_example_without_samples_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the example has no tensor with samples"):
        profile_model(nn.Linear(8, 8), example=(torch.tensor(1.0),))


def test_inputs_have_the_format_of_the_first_layer_not_of_the_first_parameter() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.ones(5, dtype=torch.complex64))
            self.layer = nn.Linear(8, 8)

        @override
        def forward(self, rows: Tensor) -> Tensor:
            out: Tensor = torch.fft.irfft(torch.fft.rfft(self.layer(rows)) * self.filter)
            return out

    assert forward_flops(profile_model(Spectral()), 1) == 2 * 8 * 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.LazyLinear(4), nn.ReLU()), "Sequential has lazy parameters"),
        (nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), "the gradient of 0 is sparse"),
    ],
)
def test_what_has_no_size_before_a_batch_is_refused_in_a_sentence(model: nn.Module, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        profile_model(model, example=(torch.zeros(2, 3, dtype=torch.int64),))


def test_a_forward_that_leaves_out_other_layers_each_time_is_refused() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.turns = itertools.count()

        @override
        def forward(self, rows: Tensor) -> Tensor:
            left_out = next(self.turns) % 3
            for number, layer in enumerate(self.layers):
                rows = rows if number == left_out else layer(rows)
            return rows

    with pytest.raises(InvalidArgument, match="two runs of its forward call other layers"):
        profile_model(Dropping())


@pytest.mark.needs_library("transformers")
def test_blocks_that_transformers_recomputes_keep_their_input_alone() -> None:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))
    assert not any(block.recomputes_itself for block in profile_model(model, sequence=16).blocks)
    model.gradient_checkpointing_enable()
    profile = profile_model(model, sequence=16)
    assert profile.num_blocks == 3
    assert all(block.recomputes_itself for block in profile.blocks)


@pytest.mark.needs_library("transformers")
def test_a_model_without_a_limit_of_positions_gets_a_usual_length() -> None:
    import transformers

    sizes = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "vocab_size": 64}
    config = transformers.XLNetConfig(**sizes)
    assert config.max_position_embeddings == -1
    assert profile_model(transformers.XLNetLMHeadModel(config)).tokens_per_sample == 512
