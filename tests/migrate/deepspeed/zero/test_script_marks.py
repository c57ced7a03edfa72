"""Under stage 3 scripts meet parameters that are whole for a while: in a forward, after one, while they generate."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.zero.gathered_parameters import GatheredParameters
from torsh_distributed.migrate.deepspeed.zero.param_access import (
    ZeroParamStatus,
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
)

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}


class WithHead(nn.Module):
    """A head that is never called: a fused loss reads its weight, as TRL's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3, bias=False)
        self.statuses: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        self.statuses.append(getattr(self.head.weight, "ds_status", None))
        return functional.linear(inputs, self.head.weight)


def made() -> WithHead:
    torch.manual_seed(3)
    return WithHead()


def engine_of(model: nn.Module) -> Any:
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=dict(CONFIG)
    )[0]


def inputs_of_rank(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def generating() -> list[float]:
    """As TRL does before each update: hooks off, generate, hooks on, then train."""
    model = made()
    engine = engine_of(model)
    inputs = inputs_of_rank(torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        with GatheredParameters(list(model.parameters())):
            offload = engine.optimizer.parameter_offload
            for module in offload.module.modules():
                for _, param in itertools.chain(module.named_parameters(), module.ds_external_parameters()):
                    assert param.ds_status is ZeroParamStatus.AVAILABLE
                    param.ds_active_sub_modules.clear()
            assert (offload.forward_hooks, offload.backward_hooks) == ([], [])
            with torch.no_grad():
                model(inputs)
            offload._register_deepspeed_module(offload.module)
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert set(model.statuses) == {ZeroParamStatus.AVAILABLE}
    return losses


def alone() -> list[list[float]]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        found = torch.stack([model(inputs_of_rank(rank)).square().mean() for rank in range(2)])
        optimizer.zero_grad()
        found.mean().backward()
        optimizer.step()
        losses.append(found.tolist())
    return losses


def test_a_model_generates_inside_gathered_parameters_and_trains_as_in_one_process(world: World) -> None:
    first, second = world.run(generating, num_ranks=2)
    expected = [[*pair] for pair in zip(first, second, strict=True)]
    torch.testing.assert_close(torch.tensor(expected), torch.tensor(alone()))


def changed_after_evaluation() -> None:
    """The outermost piece stays whole after a forward without backward; what is changed then must last."""
    model = made()
    engine = engine_of(model)
    inputs = inputs_of_rank(0)

    def head_of_next_forward() -> Tensor:
        with torch.no_grad():
            engine(inputs)
        with GatheredParameters(model.head.weight):
            return model.head.weight.detach().clone()

    expected = made().head.weight.detach()
    assert torch.equal(head_of_next_forward(), expected)
    assert torch.equal(safe_get_full_fp32_param(model.head.weight), expected)  # type: ignore[arg-type]  # it is trained
    with GatheredParameters(model.head.weight, modifier_rank=1):
        if torch.distributed.get_rank() == 1:
            model.head.weight.data.fill_(0.5)
    assert torch.equal(head_of_next_forward(), torch.full((3, 6), 0.5))
    engine.empty_partition_cache()
    assert torch.equal(head_of_next_forward(), torch.full((3, 6), 0.5))
    safe_set_full_fp32_param(model.head.weight, torch.full((3, 6), 0.25))
    engine.empty_partition_cache()
    assert torch.equal(head_of_next_forward(), torch.full((3, 6), 0.25))


def test_a_change_after_an_evaluation_reaches_the_shards(world: World) -> None:
    world.run(changed_after_evaluation, num_ranks=2)


def loss_of_gathered(is_inside: bool) -> None:
    model = made()
    engine = engine_of(model)
    loss = engine(inputs_of_rank(0)).square().mean()
    weight = model.layers[0].weight
    with GatheredParameters([weight]):
        loss = loss + weight.square().sum()
        if is_inside:
            engine.backward(loss)
    engine.backward(loss)


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_gradient_that_would_not_reach_the_shards_is_refused(world: World, is_inside: bool) -> None:
    with pytest.raises(FeatureNotAvailable, match="computed from a parameter inside GatheredParameters"):
        world.run(loss_of_gathered, is_inside, num_ranks=2)
