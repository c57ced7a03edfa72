"""Models with split sequences against the same models with whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.bed.world import World
from tests.parallel.reference import batches, build
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, TensorShapeMismatch
from torsh_distributed.parallel.context import ContextParallel
from torsh_distributed.train.demos.gpt import next_character_loss


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def check_models() -> None:
    """Loss and every gradient, averaged over the ranks, are those of the whole sequence."""
    inputs, targets = batches(1)[0]
    for kind in ("gpt", "llama"):
        whole, split = build(kind), build(kind)
        expected = next_character_loss(whole(inputs), targets)
        expected.backward()
        context = ContextParallel(split, world_group())
        part_inputs, part_targets = context.take((inputs, targets))
        with context.attending():
            loss = next_character_loss(split(part_inputs), part_targets)
            loss.backward()
        values = [loss.detach(), *(param.grad for param in split.parameters())]
        for value in values:
            dist.all_reduce(value)
            value.div_(dist.get_world_size())
        torch.testing.assert_close(values[0], expected.detach())
        for value, param in zip(values[1:], whole.parameters(), strict=True):
            torch.testing.assert_close(value, param.grad, rtol=1e-4, atol=1e-5)
        context.close()
        torch.testing.assert_close(split(inputs), whole(inputs))  # outside, the model is unchanged


def check_refusals() -> None:
    with pytest.raises(ConfigurationError, match="no table of positions was found in the model"):
        ContextParallel(nn.Linear(2, 2), world_group())
    with pytest.raises(ConfigurationError, match="the model has no buffer angles"):
        ContextParallel(build("llama"), world_group(), tables=("angles",))
    context = ContextParallel(nn.Linear(2, 2), world_group(), tables=())
    with pytest.raises(TensorShapeMismatch, match="differ in length"):
        context.take((torch.zeros(1, 8), torch.zeros(1, 16)))
    heads = torch.zeros(1, 1, 2, 4)
    with context.attending(), pytest.raises(FeatureNotAvailable, match="no custom masks, and in a ring no dropout"):
        functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "torsh"), (4, "gloo")])
def test_losses_and_gradients_equal_those_of_whole_sequences(world: World, num_ranks: int, backend: str) -> None:
    world.run(check_models, num_ranks=num_ranks, backend=backend, timeout_s=60)


def test_what_cannot_be_split_is_refused(world: World) -> None:
    world.run(check_refusals)
