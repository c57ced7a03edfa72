"""Cuts: every element on one rank, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.tensor import TensorCut
from torsh_distributed.parallel.tensor.split_params import can_be_split


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 5), st.sampled_from([0, 1, -1]), st.booleans()
)
def test_the_pieces_of_all_ranks_are_the_whole(lengths: list[int], size: int, dim: int, is_fused: bool) -> None:
    shape = [4, 4]
    shape[dim] = sum(lengths)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    cut = TensorCut(dim, tuple(lengths) if is_fused else ())
    parts = [cut.part(whole, rank=rank, size=size) for rank in range(size)]
    assert torch.equal(cut.join(parts), whole)
    assert [tuple(part.shape) for part in parts] == [cut.shape(shape, rank=rank, size=size) for rank in range(size)]


def test_each_rank_gets_its_piece_of_every_section() -> None:
    fused = torch.tensor([10, 11, 12, 13, 20, 21, 30, 31])
    assert TensorCut(0, (4, 2, 2)).part(fused, rank=1, size=2).tolist() == [12, 13, 21, 31]


def test_sections_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"do not add up"):
        TensorCut(0, (4, 2)).part(torch.zeros(8), rank=0, size=2)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    num_calls = 0

    def __init__(self, scale: float) -> None:
        super().__init__(8, 8, bias=False)
        self.scale = scale

    def forward(self, values: Tensor) -> Tensor:
        Scaled.num_calls += 1
        out: Tensor = self.scale * (values @ self.weight.T)
        return out


def test_equal_layers_without_values_are_tried_once_and_others_by_themselves() -> None:
    with torch.device("meta"):
        layers = [Scaled(1.0) for _ in range(5)]
        other = Scaled(2.0)
    assert all(can_be_split(one, nn.Linear) for one in layers)
    assert Scaled.num_calls == 1
    assert not can_be_split(other, nn.Linear)
