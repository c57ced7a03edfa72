"""Operations are counted, those of the fused loss too."""

from __future__ import annotations

import torch

from torsh_distributed.observe.loops.counted_operations import CountedOperations
from torsh_distributed.train.speed.linear_cross_entropy import linear_cross_entropy


def test_a_forward_in_inference_mode_counts_too() -> None:
    with torch.inference_mode(), CountedOperations() as counter:
        torch.nn.Linear(4, 5)(torch.ones(3, 4))
    assert counter.num_forward_flops == 2 * 3 * 4 * 5


def test_the_fused_loss_counts_as_its_product() -> None:
    hidden, weight, targets = torch.randn(6, 4), torch.randn(10, 4), torch.randint(10, (6,))
    with torch.no_grad(), CountedOperations() as counter:
        linear_cross_entropy(hidden @ torch.randn(4, 4), weight, targets)
    assert counter.num_forward_flops == 2 * 6 * 4 * 10 + 2 * 6 * 4 * 4
