"""What a mesh cannot do with a model is refused before anything is changed, with what to do instead."""

from __future__ import annotations

import pytest
from torch import nn

from tests.parallel.reference import build
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.composed import composed_strategy
from torsh_distributed.plan import FsdpConfig, PipelineConfig, Plan

V_SHAPED = PipelineConfig(schedule="zbv_zero_bubble", stages_per_rank=2)


def test_experts_are_asked_of_the_model() -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.ep 2 is for models with experts, and this one has none"):
        composed_strategy(nn.Linear(2, 2), Plan(dp=1, tp=2, ep=2))


def test_a_parameter_of_two_stages_of_one_rank_is_not_sharded() -> None:
    fsdp = FsdpConfig(strategy="shard_grad_op")
    with pytest.raises(ConfigurationError, match=r"token\.weight and head\.weight are one parameter of two stages"):
        composed_strategy(build("tied", num_layers=4), Plan(dp=1, pp=2, shard=2, fsdp=fsdp, pipeline=V_SHAPED))
