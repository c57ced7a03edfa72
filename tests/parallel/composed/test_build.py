"""What does not go together is refused before anything is changed, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.composed import composed_strategy, is_composed
from torsh_distributed.plan import (
    CompressionConfig,
    DistributedConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    PipelineConfig,
    Plan,
)


@pytest.mark.parametrize(
    ("degrees", "sections", "message"),
    [
        ({"tp": 2, "ep": 2}, {}, "mesh.ep 2 is for models with experts, and this one has none"),
        ({"pp": 2, "shard": 2}, {}, "mesh.shard with mesh.pp does not go together with pp 2"),
        ({"tp": 2, "shard": 2}, {"fsdp": FsdpConfig(strategy="shard_optimizer")}, "fsdp.strategy = shard_optimizer"),
        ({"pp": 2}, {"compress": CompressionConfig(method="topk")}, "compress with mesh.pp"),
        ({"pp": 2}, {"distributed": DistributedConfig(deterministic=True)}, "deterministic or rate_limit_gbps"),
        ({"pp": 2}, {"precision": MixedPrecisionConfig(dtype="fp16")}, "precision.dtype = fp16 with mesh.pp"),
        ({"pp": 2}, {"pipeline": PipelineConfig(balance="time")}, 'pipeline.balance = "time"'),
        ({"pp": 2, "cp": 2, "tp": 2}, {}, "mesh.pp with mesh.cp does not go together with tp 2 × pp 2 × cp 2"),
    ],
)
def test_axes_and_settings_that_clash_are_refused(
    degrees: dict[str, int], sections: dict[str, Any], message: str
) -> None:
    plan = Plan(dp=1, **degrees, **sections)
    assert is_composed(plan)
    with pytest.raises(ConfigurationError, match=message.replace(".", r"\.")):
        composed_strategy(nn.Linear(2, 2), plan)


def test_replicas_and_shards_alone_are_not_composed() -> None:
    assert not is_composed(Plan(dp=2, shard=2))
    assert not is_composed(Plan(dp=2, ep=2))
    assert is_composed(Plan(dp=1, shard=2, ep=2))
