"""Both forms of attention over split sequences against torch's own over whole ones, with every kind of mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.context.attention_heads import heads_attention, whole_attention
from torsh_distributed.parallel.context.attention_ring import ring_attention
from torsh_distributed.parallel.context.positions import PositionMask, holds_tensors, take_positions


def in_window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key > query - 3)


def by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PositionMask,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The formula, without any kernel."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    seen = torch.ones(query.shape[0], 1, length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(length):
            if (mask.is_causal and k > q) or (
                mask.allowed and not mask.allowed(0, 0, torch.tensor(q), torch.tensor(k))
            ):
                seen[:, :, q, k] = False
    if mask.keys is not None:
        seen &= mask.keys[:, None, None, :]
    if mask.documents is not None:
        seen &= mask.documents[:, None, :, None] == mask.documents[:, None, None, :]
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        extra = sinks.view(1, -1, 1, 1).expand(query.shape[0], -1, length, 1)
        scores, value = torch.cat([scores, extra], dim=-1), torch.nn.functional.pad(value, (0, 0, 0, 1))
    return torch.softmax(scores, dim=-1) @ value


def check_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    length = 4 * size
    padding = torch.arange(length) < torch.tensor([[length], [length - 3]])
    packed = (torch.arange(length) >= 5).long().expand(2, -1)
    masks = [
        PositionMask(),
        PositionMask(is_causal=True),
        PositionMask(allowed=in_window),
        PositionMask(is_causal=True, keys=padding),
        PositionMask(is_causal=True, documents=packed),
    ]
    cases = [(mask, 2, 6, None) for mask in masks] + [(masks[1], 1, 6, 2.0), (masks[2], 4, 3, 1.5)]
    for mask, shared, value_dim, softcap in cases:
        query, key = (torch.randn(2, heads, length, 6, generator=generator) for heads in (4, shared))
        value = torch.randn(2, shared, length, value_dim, generator=generator)
        weight = torch.randn(2, 4, length, value_dim, generator=generator)
        whole = [one.requires_grad_() for one in (query, key, value)]
        expected = by_hand(*whole, mask, 0.3, softcap)
        (expected * weight).sum().backward()
        for form in (ring_attention, heads_attention):
            parts = [mine(one.detach()).requires_grad_() for one in whole]
            out = form(*parts, group=group, mask=mask, scale=0.3, softcap=softcap)
            (out * mine(weight)).sum().backward()
            torch.testing.assert_close(out, mine(expected.detach()), rtol=1e-4, atol=1e-5)
            for part, one in zip(parts, whole, strict=True):
                assert one.grad is not None
                torch.testing.assert_close(part.grad, mine(one.grad), rtol=1e-4, atol=1e-5)
    with pytest.raises(TensorShapeMismatch, match="does not divide the 3 attention heads"):
        heads_attention(*(torch.zeros(1, 3, 4, 2) for _ in range(3)), group=group, mask=masks[1])


def check_sinks() -> None:
    """A score for each head in the softmax; ranks have a part of its gradient each."""
    generator = torch.Generator().manual_seed(0)
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    for mask, shared in ((PositionMask(is_causal=True), 4), (PositionMask(allowed=in_window), 2)):
        query = torch.randn(2, 4, 4 * size, 6, generator=generator)
        key, value = (torch.randn(2, shared, 4 * size, 6, generator=generator) for _ in range(2))
        weight = torch.randn(2, 4, 4 * size, 6, generator=generator)
        sinks = torch.randn(4, generator=generator)
        whole = [one.requires_grad_() for one in (query, key, value, sinks)]
        expected = by_hand(*whole[:3], mask, 0.3, sinks=sinks)
        (expected * weight).sum().backward()
        for form in (ring_attention, heads_attention):
            parts = [mine(one.detach()).requires_grad_() for one in whole[:3]]
            own = sinks.detach().clone().requires_grad_()
            out = form(*parts, group=group, mask=mask, scale=0.3, sinks=own)
            (out * mine(weight)).sum().backward()
            torch.testing.assert_close(out, mine(expected.detach()), rtol=1e-4, atol=1e-5)
            for part, one in zip(parts, whole, strict=False):
                assert one.grad is not None
                torch.testing.assert_close(part.grad, mine(one.grad), rtol=1e-4, atol=1e-5)
            assert own.grad is not None
            dist.all_reduce(own.grad)
            torch.testing.assert_close(own.grad, sinks.grad, rtol=1e-4, atol=1e-5)


def mine(tensor: Tensor) -> Tensor:
    return take_positions(tensor, 2, length=tensor.shape[2], rank=dist.get_rank(), size=dist.get_world_size())


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "torsh"), (4, "gloo")])
def test_both_forms_equal_attention_over_whole_sequences(world: World, num_ranks: int, backend: str) -> None:
    world.run(check_forms, num_ranks=num_ranks, backend=backend, timeout_s=60)


def test_sinks_take_part_in_the_softmax_of_both_forms(world: World) -> None:
    world.run(check_sinks, num_ranks=2, backend="torsh", timeout_s=60)


def test_a_query_that_sees_nothing_gives_a_number() -> None:
    keys = torch.tensor([[True, False, False, False]])
    mask = PositionMask(allowed=lambda b, h, q, k: (k <= q) & (k > q - 2), keys=keys)
    heads = torch.randn(1, 1, 4, 2)
    out = whole_attention(heads, heads, heads, mask=mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out[0, 0, :2], heads[0, 0, :1].expand(2, -1))


def test_a_mask_made_of_values_of_a_batch_is_told_from_one_of_positions() -> None:
    window, ids = 3, torch.arange(4)

    def of_positions(b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        return k > q - window

    def of_values(b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        return ids[q] == ids[k]

    def of_both(b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        return of_positions(b, h, q, k) & of_values(b, h, q, k)

    assert not holds_tensors(of_positions)
    assert holds_tensors(of_values)
    assert holds_tensors(of_both)
