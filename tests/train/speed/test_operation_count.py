"""Operations are counted, those of the fused loss too."""

from __future__ import annotations

import torch

from torsh_distributed.train.speed.linear_cross_entropy import linear_cross_entropy
from torsh_distributed.train.speed.operation_count import counting_flops


def test_the_fused_loss_counts_as_its_product() -> None:
    hidden, weight, targets = torch.randn(6, 4), torch.randn(10, 4), torch.randint(10, (6,))
    with torch.no_grad(), counting_flops() as counter:
        linear_cross_entropy(hidden @ torch.randn(4, 4), weight, targets)
    assert counter.get_total_flops() == 2 * 6 * 4 * 10 + 2 * 6 * 4 * 4
