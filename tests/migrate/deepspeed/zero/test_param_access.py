"""A sharded parameter that a script holds is whole inside GatheredParameters, and has DeepSpeed's marks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.zero.gathered_parameters import GatheredParameters, Init
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
    half = expected.chunk(2)[torch.distributed.get_rank()]
    assert torch.equal(weight.ds_tensor, half.flatten())
    assert (weight.partition_numel(), weight.ds_persist) == (12, False)
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
    assert torch.equal(weight.ds_tensor, weight.to_local().flatten())  # after an update too
    return {"marked": True, "status": weight.ds_status.name}


def test_the_object_that_a_script_holds_becomes_whole(world: World) -> None:
    assert world.run(gathered, 3, num_ranks=2) == [{"marked": True, "status": "NOT_AVAILABLE"}] * 2
    assert world.run(gathered, 1, num_ranks=2) == [{"marked": False}] * 2


def marked_before() -> list[Any]:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    with Init(config_dict_or_path=config):
        model: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    plain: Any = nn.Linear(2, 2)
    assert not hasattr(plain.weight, "ds_id")
    ids = [param.ds_id for param in model.parameters()]
    weight = model[0].weight
    assert (tuple(weight.ds_shape), weight.ds_numel, weight.dtype) == ((4, 6), 24, torch.bfloat16)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters(weight, modifier_rank=0):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        if torch.distributed.get_rank() == 0:
            weight.data.fill_(0.5)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert bool((weight == 0.5).all())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with GatheredParameters(engine.module[0].weight):
        assert bool((engine.module[0].weight == 0.5).all())
    assert hasattr(engine.module[1].bias, "ds_id")
    with pytest.raises(AssertionError, match="sharded already"):
        deepspeed.initialize(model=engine.module, config=config)
    Init(module=plain, config_dict_or_path=config)
    return [ids, plain.weight.ds_id > ids[-1], plain.weight.dtype == torch.bfloat16]


def test_a_model_under_construction_has_deepspeeds_marks(world: World) -> None:
    first, second = world.run(marked_before, num_ranks=2)
    assert first == second
    assert first[0] == [*range(first[0][0], first[0][0] + 4)]
    assert first[1:] == [True, True]


def several_engines() -> list[float]:
    """An actor that is trained, a critic, and a reference that is not, each whole when it is gathered."""
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    torch.manual_seed(0)
    actor, critic, reference = (nn.Linear(3, 1) for _ in range(3))
    reference.load_state_dict(actor.state_dict())
    engines = [
        deepspeed.initialize(model=one, optimizer=torch.optim.SGD(one.parameters(), lr=0.1), config=config)[0]
        for one in (actor, critic)
    ]
    frozen, *_ = deepspeed.initialize(model=reference.requires_grad_(False), config=config)
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).chunk(2)[torch.distributed.get_rank()]
    losses = []
    for _ in range(3):
        for engine in engines:
            with torch.no_grad():
                target = frozen(inputs) + 1.0
            loss = (engine(inputs) - target).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    pairs = list(zip(engines[0].module.parameters(), frozen.module.parameters(), strict=True))
    for mine, other in pairs:
        with GatheredParameters([mine, other], modifier_rank=0):
            assert not torch.allclose(mine, other)
            if torch.distributed.get_rank() == 0:
                mine.data.copy_(0.5 * mine.data + 0.5 * other.data)
                assert mine.detach().cpu().numpy().shape == tuple(mine.ds_shape)
    return losses


def test_actor_critic_and_reference_train_as_one_process(world: World) -> None:
    by_rank = world.run(several_engines, num_ranks=2)
    torch.manual_seed(0)
    models = [nn.Linear(3, 1) for _ in range(2)]
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        target = models[0](inputs) + 1.0
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    losses = []
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(inputs) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert [sum(one) / 2 for one in zip(*by_rank, strict=True)] == pytest.approx(losses, rel=1e-5)
