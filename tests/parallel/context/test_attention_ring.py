"""Ring attention against torch's own attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.parallel.context import ring_attention
from torsh_distributed.parallel.context.positions import take_positions


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


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "torsh"), (4, "gloo")])
def test_output_and_gradients_equal_those_of_one_process(world: World, num_ranks: int, backend: str) -> None:
    world.run(check_attention, num_ranks=num_ranks, backend=backend, timeout_s=60)
