"""Attention with heads in place of positions (Ulysses): an all-to-all gives each rank whole sequences of some heads.

Torch's own attention runs on them, and a second all-to-all gives the positions back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.context.positions import PositionMask


def heads_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup,
    mask: PositionMask,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the whole sequence, of which each rank of `group` has the positions given by `chunks_of`.

    query, key, value: (batch, heads, length here, head dim); keys and values may have fewer heads, which queries share
    in order. `sinks` has a score for each head that takes part in its softmax and adds no value. Returns the output for
    this rank's positions.
    """
    size = group.size()
    if query.shape[1] % size:
        raise TensorShapeMismatch(
            f"mesh.cp {size} does not divide the {query.shape[1]} attention heads that a rank has",
            hint='use context.form = "ring", which splits no heads',
        )
    key, value = (_spread(one, size) for one in (key, value))
    if query.shape[-1] == value.shape[-1]:
        counts = [one.shape[1] // size for one in (query, key, value)]
        packed = torch.cat([torch.unflatten(one, 1, (size, -1)) for one in (query, key, value)], dim=2).flatten(1, 2)
        query, key, value = torch.split(_to_heads(packed, group), counts, dim=1)
    else:
        query, key, value = (_to_heads(one, group) for one in (query, key, value))
    mine = None if sinks is None else sinks.chunk(size)[group.rank()]
    out = whole_attention(query, key, value, mask=mask, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=mine)
    result: Tensor = _Exchange.apply(out, group, False)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: PositionMask,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of whole sequences, by torch's kernels where they can."""
    length = query.shape[-2]
    has_kernel = softcap is None and sinks is None
    if has_kernel and mask.is_plain:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=mask.is_causal,
            scale=scale,
            dropout_p=dropout_p,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    seen = mask.block(slice(0, length), slice(0, length), query.device)
    if isinstance(seen, Tensor):
        # Padding may see nothing at all; its result is not used, but must be a number.
        seen = seen | ~seen.any(dim=-1, keepdim=True)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
    if has_kernel:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen if isinstance(seen, Tensor) else None, scale=scale, dropout_p=dropout_p
        )
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)).float() * factor
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(seen, Tensor):
        scores = scores.masked_fill(~seen, -math.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        extra = sinks.float().view(1, -1, 1, 1).expand(len(scores), -1, length, 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    return functional.dropout(weights, dropout_p).to(value.dtype) @ value


def _spread(heads: Tensor, size: int) -> Tensor:
    """Keys or values repeated until their heads divide over the ranks: a rank needs those of its queries."""
    repeats = size // math.gcd(heads.shape[1], size)
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)


def _to_heads(positions: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Exchange.apply(positions, group, True)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


class _Exchange(torch.autograd.Function):
    """(batch, heads, length here, dim) to (batch, heads / ranks, length, dim), or back; backward is the other one."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, is_to_heads: bool) -> Tensor:
        ctx.group, ctx.is_to_heads = group, is_to_heads
        return (_heads_of if is_to_heads else _positions_of)(tensor, group)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = _positions_of if ctx.is_to_heads else _heads_of
        return back(grads[0].contiguous(), ctx.group), None, None


def _heads_of(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    sent = torch.unflatten(tensor, 1, (size, -1)).movedim(1, 0).contiguous()
    received = all_to_all_single(sent, group=group)  # (rank, batch, heads, length here, dim)
    if tensor.shape[2] % 2 == 0:
        # Two chunks from each rank, one from each end of the sequence (see chunks_of).
        first, second = torch.unflatten(received, 3, (2, -1)).unbind(3)
        received = torch.cat([first, second.flip(0)])
    return received.movedim(0, 2).flatten(2, 3)


def _positions_of(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    if tensor.shape[2] % (2 * size) == 0:
        chunks = torch.unflatten(tensor, 2, (2 * size, -1)).movedim(2, 0)
        sent = torch.cat([chunks[:size], chunks[size:].flip(0)], dim=3)
    else:
        sent = torch.unflatten(tensor, 2, (size, -1)).movedim(2, 0)
    received = all_to_all_single(sent.contiguous(), group=group)  # (rank, batch, heads / ranks, length here, dim)
    return received.movedim(0, 1).flatten(1, 2)
