"""What a model asks of values while it is traced: answered where there is one answer for a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torsh_distributed.planner.model.profiling import profile_model
from torsh_distributed.planner.model.value_questions import answer_without_values


class LayerDrop(nn.Module):
    """Leaves layers out at random, as OPT, BART and Whisper do in training."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) < self.share:
                continue
            values = block(values)
        return values


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_model_that_leaves_layers_out_is_planned_with_all_of_them(share: float) -> None:
    profile = profile_model(LayerDrop(share), example=(torch.zeros(1, 16),))
    assert len(profile.order) == 4
    assert sum(block.forward_flops.at(1) for block in profile.chain()) == 4 * 2 * 16 * 16


def test_a_grouped_product_has_the_shape_of_a_real_one() -> None:
    rows, stack = torch.randn(16, 8), torch.randn(3, 8, 24)
    ends = torch.tensor([4, 12, 16], dtype=torch.int32)
    grouped = torch.ops.aten._grouped_mm.default
    for left, right in ((rows, stack), (rows.T, torch.randn(16, 24))):
        real = functional.grouped_mm(left, right, offs=ends)
        answer = answer_without_values(grouped, (left, right, ends))
        assert answer is not None
        assert (answer.shape, answer.dtype) == (real.shape, real.dtype)
