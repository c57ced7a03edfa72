"""A model without `generate` is refused; `tests/train/test_transformers.py` has those that have it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize


def refused() -> str:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    engine = parallelize(nn.Linear(2, 2), sgd, Plan(dp=-1), loss_fn=nn.functional.mse_loss)
    with pytest.raises(InvalidArgument) as caught:
        engine.generate(torch.ones(1, 2))
    return str(caught.value)


def test_a_model_without_generate_is_refused(world: World) -> None:
    assert "Linear has no generate()" in world.run(refused, num_ranks=1)[0]
