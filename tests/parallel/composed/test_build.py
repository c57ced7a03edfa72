"""What does not go together is refused before anything is changed, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.parallel.reference import build
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.composed import composed_strategy
from torsh_distributed.plan import (
    CompressConfig,
    DistributedConfig,
    FsdpConfig,
    PipelineConfig,
    Plan,
    PrecisionConfig,
)

V_SHAPED = PipelineConfig(schedule="zbv_zero_bubble", stages_per_rank=2)


@pytest.mark.parametrize(
    ("degrees", "sections", "message"),
    [
        ({"tp": 2, "ep": 2}, {}, "mesh.ep 2 is for models with experts, and this one has none"),
        ({"tp": 2, "shard": 2}, {"fsdp": FsdpConfig(strategy="shard_optimizer")}, "fsdp.strategy = shard_optimizer"),
        ({"pp": 2}, {"compress": CompressConfig(method="topk")}, "compress.method = topk does not go together"),
        (
            {"cp": 2, "shard": 2},
            {"compress": CompressConfig(method="topk")},
            "compress.method = topk with mesh.shard",
        ),
        ({"pp": 2}, {"precision": PrecisionConfig(reduce_dtype="bf16")}, "precision.reduce_dtype = bf16"),
        ({"tp": 2}, {"distributed": DistributedConfig(deterministic=True)}, "deterministic or rate_limit_gbps does"),
        (
            {"pp": 2, "shard": 2},
            {"distributed": DistributedConfig(algorithm="ring")},
            "deterministic or rate_limit_gbps with mesh.shard",
        ),
        ({"pp": 2, "shard": 2}, {"pipeline": V_SHAPED}, "pipeline.schedule = zbv_zero_bubble with parameters that"),
    ],
)
def test_axes_and_settings_that_clash_are_refused(
    degrees: dict[str, int], sections: dict[str, Any], message: str
) -> None:
    plan = Plan(dp=1, **degrees, **sections)
    with pytest.raises(ConfigurationError, match=message.replace(".", r"\.")):
        composed_strategy(nn.Linear(2, 2), plan)


def test_a_parameter_of_two_stages_of_one_rank_is_not_sharded() -> None:
    fsdp = FsdpConfig(strategy="shard_grad_op")
    with pytest.raises(ConfigurationError, match=r"token\.weight and head\.weight are one parameter of two stages"):
        composed_strategy(build("tied", num_layers=4), Plan(dp=1, pp=2, shard=2, fsdp=fsdp, pipeline=V_SHAPED))
