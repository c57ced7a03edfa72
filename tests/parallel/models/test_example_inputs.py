"""What a model's forward is given: no cache for generation in training, an example to compare it on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.tiny_transformers import tiny, tiny_batches
from torsh_distributed.parallel.composed.build import _split_check
from torsh_distributed.parallel.models.example_inputs import (
    example_inputs,
    keep_no_cache_in_training,
    passing_values,
    run_device,
)
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


CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.held = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.held = sum(not param.is_meta for param in self.parameters())
        out: Tensor = self.norm(self.second(hidden).relu())
        return out


def test_values_come_with_a_call_and_go_with_it() -> None:
    with torch.device("meta"):
        net = Net().eval()
    before = dict(net.named_parameters())
    assert run_device(net).type == "meta"
    with passing_values(net, CPU), torch.no_grad():
        assert run_device(net) == CPU
        first, second = net(torch.ones(2, 4)), net(torch.ones(2, 4))
        other = net(torch.full((2, 4), 2.0))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)
    assert net.held == 0, "between two calls no module holds any"
    assert all(param is before[name] for name, param in net.named_parameters())
    assert all(buffer.is_meta for buffer in net.buffers())
    assert not net.first._forward_pre_hooks


class Reads(Net):
    """Reads a weight without calling the module that has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.second.weight.T


def test_a_weight_that_is_read_from_outside_has_no_value() -> None:
    with torch.device("meta"):
        net = Reads()
    with passing_values(net, CPU), pytest.raises(RuntimeError):
        net(torch.ones(2, 4))
    assert all(param.is_meta for param in net.parameters())
