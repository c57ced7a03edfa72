"""Ranks that hold different models learn which parameter differs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.models.same_model import check_same_model


def differing(case: str) -> nn.Module:
    rank = dist.get_rank()
    if case == "shape":
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + (rank == 2)))
    if case == "dtype":
        return nn.Linear(4, 4).to(torch.bfloat16 if rank == 1 else torch.float32)
    if case == "missing":
        return nn.Linear(4, 4, bias=rank != 0)
    names = ["a", "b"] if rank else ["b", "a"]
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


DIFFERENCES = {
    "shape": "the model differs between ranks: 1.weight is (4, 4) float32 on ranks 0, 1; (5, 4) float32 on rank 2",
    "dtype": "weight is (4, 4) float32 on ranks 0, 2; (4, 4) bfloat16 on rank 1",
    "missing": "bias is not there on rank 0; (4,) float32 on ranks 1, 2",
    "order": "the same parameters are in another order",
}


def check_all(cases: list[str]) -> list[str]:
    check_same_model(nn.Linear(3, 3))
    texts = []
    for case in cases:
        with pytest.raises(TensorShapeMismatch) as caught:
            check_same_model(differing(case))
        texts.append(str(caught.value))
    return texts


def test_every_rank_gets_the_name_of_the_parameter_that_differs_and_where(world: World) -> None:
    for texts in world.run(check_all, list(DIFFERENCES), num_ranks=3):
        for (case, expected), text in zip(DIFFERENCES.items(), texts, strict=True):
            assert expected in text, case
            assert "hint:" in text
