"""Ring attention: keys and values pass around the ranks while each rank attends with its own queries.

The softmax is updated as blocks arrive (online softmax), so no rank ever holds the scores of a whole sequence. Blocks
hidden by a causal mask are skipped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.point_to_point import irecv, isend
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.parallel.context.positions import PositionMask, chunks_of


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup,
    is_causal: bool = False,
    scale: float | None = None,
    mask: PositionMask | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the whole sequence, of which each rank of `group` has the positions given by `chunks_of`.

    query, key, value: (…, heads, length here, head dim), of the same shape on all ranks, which all call this. Keys and
    values may have fewer heads, which queries share in order: only those travel. `mask` replaces `is_causal`;
    `softcap` bounds the scores. `sinks` has a score for each head that takes part in its softmax and adds no value.
    Returns the output for this rank's positions.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    seen = PositionMask(is_causal=is_causal) if mask is None else mask
    shared = key.shape[-3]
    if shared != query.shape[-3]:
        query = torch.unflatten(query, -3, (shared, -1))
        key, value = key.unsqueeze(-3), value.unsqueeze(-3)
        start = None if sinks is None else sinks.view(shared, -1, 1)
        out: Tensor = _RingAttention.apply(query, key, value, start, group, seen, factor, softcap)  # type: ignore[no-untyped-call]  # untyped
        return out.flatten(-4, -3)
    start = None if sinks is None else sinks.unsqueeze(-1)
    whole: Tensor = _RingAttention.apply(query, key, value, start, group, seen, factor, softcap)  # type: ignore[no-untyped-call]  # untyped
    return whole


class _RingAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        group: dist.ProcessGroup,
        mask: PositionMask,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        blocks = _Blocks(query.shape[-2], group, mask)
        out = torch.zeros(query.shape[:-1] + value.shape[-1:], dtype=torch.float32, device=query.device)
        # A sink is a score without a value: the softmax's sum starts with it.
        first = torch.tensor(-math.inf, device=query.device) if sinks is None else sinks
        total = first.float().expand(query.shape[:-1]).clone()
        sizes = [key.shape[-1], value.shape[-1]]
        held = torch.cat([key, value], dim=-1)
        for source in blocks.sources():
            arriving = _RingShift(held, group) if source != blocks.last else None
            for mine, theirs, seen in blocks.pairs(source, query):
                keys, values = torch.split(held[..., theirs, :], sizes, dim=-1)
                scores = _scores(query[..., mine, :], keys, scale, softcap, seen)
                part = torch.logsumexp(scores, dim=-1)
                value_part = _shares(scores, part) @ values.float()
                _fold(out[..., mine, :], total[..., mine], value_part, part)
            if arriving is not None:
                held = arriving.wait()
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.blocks, ctx.scale, ctx.softcap = blocks, scale, softcap
        return out.to(query.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, sinks, out, total = ctx.saved_tensors
        blocks, scale, softcap = ctx.blocks, ctx.scale, ctx.softcap
        grad = grads[0].float()
        inner = (grad * out).sum(dim=-1)
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        sizes = [key.shape[-1], value.shape[-1]]
        held = torch.cat([key, value], dim=-1)
        # Gradients of keys and values pass around with them and are back after a full round.
        carried = torch.zeros_like(held, dtype=torch.float32)
        for source in blocks.sources():
            arriving = _RingShift(held, blocks.group) if source != blocks.last else None
            grad_keys, grad_values = torch.split(carried, sizes, dim=-1)
            for mine, theirs, seen in blocks.pairs(source, query):
                keys, values = torch.split(held[..., theirs, :].float(), sizes, dim=-1)
                scores = _scores(query[..., mine, :], keys, scale, softcap, seen)
                weights = _shares(scores, total[..., mine])
                here = grad[..., mine, :]
                grad_values[..., theirs, :] += _over_shared(weights.transpose(-1, -2) @ here, values)
                change = weights * (here @ values.transpose(-1, -2) - inner[..., mine].unsqueeze(-1)) * scale
                if softcap is not None:
                    # Hidden scores are -inf; their change is 0 already.
                    change = change * (1 - (scores.clamp(min=-softcap) / softcap) ** 2)
                grad_query[..., mine, :] += change @ keys
                grad_keys[..., theirs, :] += _over_shared(change.transpose(-1, -2) @ query[..., mine, :].float(), keys)
            carried = _RingShift(carried, blocks.group).wait()
            if arriving is not None:
                held = arriving.wait()
        kind = query.dtype
        grad_key, grad_value = torch.split(carried, sizes, dim=-1)
        grad_sinks = None
        if sinks is not None:
            grad_sinks = -(torch.exp(sinks.float() - total) * inner).sum_to_size(sinks.shape).to(sinks.dtype)
        return grad_query.to(kind), grad_key.to(kind), grad_value.to(kind), grad_sinks, None, None, None, None


class _Blocks:
    """The blocks of the score matrix that this rank computes: those not hidden by the mask."""

    def __init__(self, local_length: int, group: dist.ProcessGroup, mask: PositionMask) -> None:
        self.group, self._mask = group, mask
        self._length = local_length * group.size()
        self.last = (group.rank() + 1) % group.size()

    def sources(self) -> list[int]:
        """The rank whose keys are here in each round, this rank first."""
        rank, size = self.group.rank(), self.group.size()
        return [(rank - round_) % size for round_ in range(size)]

    def pairs(self, source: int, query: Tensor) -> list[tuple[slice, slice, Tensor | bool]]:
        """Pairs of own query chunks and `source`'s key chunks, and what the first see of the second."""
        found: list[tuple[slice, slice, Tensor | bool]] = []
        for mine, rows in self._chunks(self.group.rank()):
            for theirs, columns in self._chunks(source):
                if self._mask.is_causal and columns.start > rows.start:
                    continue
                seen = self._mask.block(rows, columns, query.device)
                if seen is False:
                    continue
                if isinstance(seen, Tensor):
                    # From (batch, 1, queries, keys): heads may be in groups, and there may be no batch.
                    seen = seen.unsqueeze(1) if query.dim() == 5 else seen.reshape(seen.shape[4 - query.dim() :])
                found.append((mine, theirs, seen))
        return found

    def _chunks(self, rank: int) -> list[tuple[slice, slice]]:
        """Each chunk of positions on `rank`: its slice on that rank, and its slice of the whole sequence."""
        out, place = [], 0
        for start, stop in chunks_of(self._length, rank=rank, size=self.group.size()):
            out.append((slice(place, place + stop - start), slice(start, stop)))
            place += stop - start
        return out


class _RingShift:
    """Sends a tensor to the next rank of the ring and receives that of the previous one."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._works: list[Work[None] | Work[int]] = []
        self._received = torch.empty_like(tensor) if size > 1 else tensor
        if size == 1:
            return
        following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._works = [
            isend(tensor, following, group=group),
            irecv(self._received, previous, group=group),
        ]

    def wait(self) -> Tensor:
        """The tensor of the previous rank."""
        for work in self._works:
            work.wait()
        return self._received


def _scores(query: Tensor, key: Tensor, scale: float, softcap: float | None, seen: Tensor | bool) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, -math.inf) if isinstance(seen, Tensor) else scores


def _shares(scores: Tensor, total: Tensor) -> Tensor:
    """Each score's share of the softmax's sum; 0 for a query that sees nothing, whose sum is 0."""
    sums = total.unsqueeze(-1)
    return torch.exp(scores - sums.masked_fill(sums == -math.inf, 0))


def _over_shared(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients of keys or values that several query heads share, summed over these."""
    return grad.sum(dim=-3, keepdim=True) if like.shape[-3] != grad.shape[-3] else grad


def _fold(out: Tensor, total: Tensor, part: Tensor, part_total: Tensor) -> None:
    """Merge a block's result into the total so far, in place, each weighted by its share of the softmax's sum."""
    both = torch.logaddexp(total, part_total)
    kept = both.masked_fill(both == -math.inf, 0)
    out.mul_(torch.exp(total - kept).unsqueeze(-1)).add_(part * torch.exp(part_total - kept).unsqueeze(-1))
    total.copy_(both)
