"""Two ways to compute all experts at once, against a product for each expert with torch's own gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torsh_distributed.parallel.expert import layer as layer_module
from torsh_distributed.parallel.expert.grouped import (
    ExpertSegment,
    ends_of,
    grouped_linear,
    segmented_linear,
    segments_of,
)
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.plan.sections.expert import ExpertConfig


def one_by_one(rows: Tensor, weight: Tensor, bias: Tensor, segments: tuple[ExpertSegment, ...]) -> Tensor:
    made = [rows[one.start : one.stop] @ weight[one.expert] + bias[one.expert] for one in segments]
    return torch.cat([rows @ weight[0] * 0, *made])[len(rows) :]


@settings(max_examples=40)
@given(counts=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=3))
def test_segments_equal_a_product_for_each_expert(counts: list[list[int]]) -> None:
    """Experts come back once for each source, and some have no row at all."""
    torch.manual_seed(0)
    segments = segments_of(counts)
    assert sum(one.stop - one.start for one in segments) == sum(map(sum, counts))
    shapes = [(sum(map(sum, counts)), 4), (3, 4, 5), (3, 5)]
    leaves = [[torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]]
    leaves.append([leaf.detach().clone().requires_grad_() for leaf in leaves[0]])
    ours, expected = segmented_linear(*leaves[0], segments), one_by_one(*leaves[1], segments)
    torch.testing.assert_close(ours, expected)
    probe = torch.randn_like(ours)
    (ours * probe).sum().backward()
    (expected * probe).sum().backward()
    for mine, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(mine.grad, torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)


def test_the_grouped_product_is_the_segmented_one() -> None:
    """On a CPU torch computes it slowly, but it computes the same."""
    torch.manual_seed(1)
    counts = [4, 0, 7]
    rows, weight, bias = torch.randn(11, 8), torch.randn(3, 8, 16), torch.randn(3, 16)
    leaves = [[value.clone().requires_grad_() for value in (rows, weight, bias)] for _ in range(2)]
    sizes = torch.tensor(counts)
    grouped = grouped_linear(*leaves[0], sizes, ends_of(sizes))
    segmented = segmented_linear(*leaves[1], segments_of([counts]))
    torch.testing.assert_close(grouped, segmented)
    grouped.square().sum().backward()
    segmented.square().sum().backward()
    for mine, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("overflow", ["none", "drop"])
def test_a_layer_with_the_grouped_product_has_the_same_output(monkeypatch: pytest.MonkeyPatch, overflow: str) -> None:
    config = ExpertConfig(num_experts=4, overflow=overflow, capacity_factor=0.8)  # type: ignore[arg-type]
    torch.manual_seed(2)
    layer, tokens = MoELayer(8, 16, config), torch.randn(20, 8)
    expected = layer(tokens)
    monkeypatch.setattr(layer_module, "can_group", lambda rows, weight: True)
    torch.testing.assert_close(layer(tokens), expected)


def test_rows_of_several_sources_are_sorted_by_expert_and_put_back() -> None:
    incoming = torch.tensor([[2, 1], [0, 3]])
    order = layer_module._by_expert(incoming)
    assert order.tolist() == [0, 1, 2, 3, 4, 5]
    assert layer_module._by_expert(torch.tensor([[1, 2], [2, 1]])).tolist() == [0, 3, 4, 1, 2, 5]
