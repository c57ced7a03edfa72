"""A sharded parameter that a script holds is whole inside GatheredParameters, and has DeepSpeed's marks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.zero.gathered_parameters import GatheredParameters
from torsh_distributed.migrate.deepspeed.zero.param_access import ZeroParamStatus


def gathered(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    expected = model.weight.detach().clone()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}},
    )
    weight: Any = engine.module.weight
    if stage == 1:
        return {"marked": hasattr(weight, "ds_id")}
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert (tuple(weight.ds_shape), weight.ds_numel) == ((4, 6), 24)
    with GatheredParameters([weight, weight]):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert isinstance(weight, nn.Parameter)
        copied = weight.data.detach().cpu().clone()
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, expected)
        assert torch.equal(torch.stack([weight, weight])[1], expected)
        assert torch.equal(weight[0] * 2, expected[0] * 2)
        assert torch.equal(nn.functional.linear(torch.eye(6), weight), expected.t())
        assert type(pickle.loads(pickle.dumps(weight.detach()))) is torch.Tensor
        assert "tensor(" in repr(weight)
        assert torch.equal(engine.module.weight, expected)
    assert hasattr(weight, "to_local")
    assert weight.to_local().shape == (2, 6)
    with GatheredParameters(weight, modifier_rank=1):
        if torch.distributed.get_rank() == 1:
            nn.init.constant_(weight, 3.0)
    with GatheredParameters(weight):
        assert torch.equal(weight.detach(), torch.full((4, 6), 3.0))
        weight.data.zero_()  # lost: no rank modifies
    with pytest.raises(KeyError), GatheredParameters(weight):
        raise KeyError
    bias = float(engine.module.bias.full_tensor().sum())
    loss = engine(torch.ones(1, 6)).sum()
    assert loss.item() == pytest.approx(3.0 * 24 + bias)
    engine.backward(loss)
    engine.step()
    return {"marked": True, "status": weight.ds_status.name}


def test_the_object_that_a_script_holds_becomes_whole(world: World) -> None:
    assert world.run(gathered, 3, num_ranks=2) == [{"marked": True, "status": "NOT_AVAILABLE"}] * 2
    assert world.run(gathered, 1, num_ranks=2) == [{"marked": False}] * 2
