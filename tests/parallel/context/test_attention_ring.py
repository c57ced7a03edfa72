"""Ring attention against torch's own, and models with split sequences against whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from tests.parallel.reference import batches, build
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, TensorShapeMismatch
from torsh_distributed.parallel.context import ContextParallel, ring_attention
from torsh_distributed.parallel.context.order import take_positions
from torsh_distributed.train.demos.gpt import next_character_loss


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def mine(tensor: Tensor, dim: int) -> Tensor:
    return take_positions(tensor, dim, length=tensor.shape[dim], rank=dist.get_rank(), size=dist.get_world_size())


def check_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    size = dist.get_world_size()
    for length, is_causal, dtype in [
        (4 * size, True, torch.float32),
        (3 * size, True, torch.float32),
        (2 * size, False, torch.float32),
        (4 * size, True, torch.bfloat16),
    ]:
        whole = [torch.randn(2, 3, length, 5, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
        weight = torch.randn(2, 3, length, 5, generator=generator).to(dtype)
        expected = functional.scaled_dot_product_attention(*whole, is_causal=is_causal)
        (expected * weight).sum().backward()
        parts = [mine(one.detach(), 2).requires_grad_() for one in whole]
        out = ring_attention(*parts, group=world_group(), is_causal=is_causal)
        (out * mine(weight, 2)).sum().backward()
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
        torch.testing.assert_close(out, mine(expected.detach(), 2), **near)
        for part, one in zip(parts, whole, strict=True):
            assert one.grad is not None
            torch.testing.assert_close(part.grad, mine(one.grad, 2), **near)


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
        torch.testing.assert_close(split(inputs), whole(inputs))  # outside, the model is as it was


def check_refusals() -> None:
    with pytest.raises(ConfigurationError, match="no table of positions was found in the model"):
        ContextParallel(nn.Linear(2, 2), world_group())
    with pytest.raises(ConfigurationError, match="the model has no buffer angles"):
        ContextParallel(build("llama"), world_group(), tables=("angles",))
    context = ContextParallel(nn.Linear(2, 2), world_group(), tables=())
    with pytest.raises(TensorShapeMismatch, match="differ in length"):
        context.take((torch.zeros(1, 8), torch.zeros(1, 16)))
    heads = torch.zeros(1, 1, 2, 4)
    with context.attending(), pytest.raises(FeatureNotAvailable, match="neither custom masks nor dropout"):
        functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)


def check_all() -> None:
    check_attention()
    check_models()
    check_refusals()


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "torsh"), (4, "gloo")])
def test_split_sequences_equal_whole_ones(world: World, num_ranks: int, backend: str) -> None:
    world.run(check_all, num_ranks=num_ranks, backend=backend, timeout_s=60)
