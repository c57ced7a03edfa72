"""Optimizers under DeepSpeed's names update as their papers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.ops import (
    DeepSpeedCPUAdam,
    FusedAdam,
    FusedLamb,
    FusedLion,
    MuonWithAuxAdam,
    orthogonalized,
)


def trained(kind: Any, num_steps: int = 4, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = kind(model.parameters(), lr=0.05, **options)
    for step in range(num_steps):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_adam_is_adamw_without_weight_decay_unless_told_otherwise(kind: Any) -> None:
    torch.testing.assert_close(trained(kind), trained(torch.optim.AdamW, weight_decay=0.0))
    torch.testing.assert_close(trained(kind, weight_decay=0.1), trained(torch.optim.AdamW, weight_decay=0.1))
    mode = {"adam_w_mode" if kind is FusedAdam else "adamw_mode": False}
    torch.testing.assert_close(trained(kind, weight_decay=0.1, **mode), trained(torch.optim.Adam, weight_decay=0.1))
    with pytest.raises(FeatureNotAvailable, match="AMSGrad"):
        trained(kind, amsgrad=True)


def test_cpu_adam_updates_16_bit_parameters_too() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdam([param], lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param.tolist() == pytest.approx([0.5] * 3, rel=0.01)


def test_lamb_clamps_the_ratio_of_norms() -> None:
    param = nn.Parameter(torch.full((4,), 100.0))
    optimizer = FusedLamb([param], lr=0.01, bias_correction=False)
    param.grad = torch.ones(4)
    optimizer.step()
    step = 0.1 / 0.001**0.5  # beta1 and beta2 alone, since nothing is corrected
    assert param[0].item() == pytest.approx(100 - 0.01 * 10.0 * step, rel=1e-4)  # 10: the largest ratio


def test_lion_steps_by_the_sign() -> None:
    param = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = FusedLion([param], lr=0.1)
    param.grad = torch.tensor([3.0, -0.001])
    optimizer.step()
    assert param.tolist() == pytest.approx([0.9, 1.1])


def test_muon_orthogonalizes_matrices_and_leaves_embeddings_to_adam() -> None:
    values = torch.linalg.svdvals(orthogonalized(torch.randn(6, 10, generator=torch.Generator().manual_seed(1))))
    assert values.min() > 0.6
    assert values.max() < 1.3
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "layer": nn.Linear(3, 2)})
    names = {id(param): name for name, param in model.named_parameters()}
    made = MuonWithAuxAdam.from_config(list(model.parameters()), {"lr": 0.1, "adam_lr": 0.01}, names)
    found = {group["use_muon"]: [names[id(param)] for param in group["params"]] for group in made.param_groups}
    assert found == {True: ["layer.weight"], False: ["embed.weight", "layer.bias"]}
    assert {group["use_muon"]: group["lr"] for group in made.param_groups} == {True: 0.1, False: 0.01}
    with pytest.raises(ConfigurationError, match=r"optimizer\.params\.colour"):
        MuonWithAuxAdam.from_config(list(model.parameters()), {"colour": 1}, names)
