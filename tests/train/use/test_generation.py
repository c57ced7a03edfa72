"""Text from a model that is split over ranks comes from the whole of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))


def generated() -> tuple[list[list[int]], str]:
    engine = parallelize(gpt2(), SGD, Plan(dp=1, tp=2))
    ids = torch.full((1, 4), 5 + dist.get_rank())
    out = engine.generate(ids, max_new_tokens=6, do_sample=False)
    plain = parallelize(nn.Linear(2, 2), SGD, Plan(dp=2), loss_fn=nn.functional.mse_loss)
    with pytest.raises(InvalidArgument) as caught:
        plain.generate(ids)
    return out.tolist(), str(caught.value)


@pytest.mark.needs_library("transformers")
def test_a_split_model_is_put_together_to_generate(world: World) -> None:
    wanted = gpt2().generate(torch.full((1, 4), 5), max_new_tokens=6, do_sample=False).tolist()
    for found, text in world.run(generated):
        assert found == wanted
        assert "Linear has no generate()" in text
