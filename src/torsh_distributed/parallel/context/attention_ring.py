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
from torsh_distributed.parallel.context.order import chunks_of


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention over the whole sequence, of which each rank of `group` has the positions given by `chunks_of`.

    query, key, value: (…, heads, length here, head dim), of the same shape on all ranks, which all call this. Returns
    the output for this rank's positions.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, group, is_causal, factor)  # type: ignore[no-untyped-call]  # untyped
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, is_causal: bool, scale: float
    ) -> Tensor:
        blocks = _Blocks(query.shape[-2], group, is_causal)
        out = torch.zeros(query.shape[:-1] + value.shape[-1:], dtype=torch.float32, device=query.device)
        total = torch.full(query.shape[:-1], -math.inf, dtype=torch.float32, device=query.device)
        held = torch.stack([key, value])
        for source in blocks.sources():
            arriving = _RingShift(held, group) if source != blocks.last else None
            for mine, theirs, is_diagonal in blocks.pairs(source):
                scores = _scores(query[..., mine, :], held[0][..., theirs, :], scale, is_diagonal)
                part = torch.logsumexp(scores, dim=-1)
                value_part = torch.exp(scores - part.unsqueeze(-1)) @ held[1][..., theirs, :].float()
                _fold(out[..., mine, :], total[..., mine], value_part, part)
            if arriving is not None:
                held = arriving.wait()
        ctx.save_for_backward(query, key, value, out, total)
        ctx.blocks, ctx.scale = blocks, scale
        return out.to(query.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, total = ctx.saved_tensors
        blocks, scale = ctx.blocks, ctx.scale
        grad = grads[0].float()
        inner = (grad * out).sum(dim=-1)
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        held = torch.stack([key, value])
        # Gradients of keys and values pass around with them and are back after a full round.
        carried = torch.zeros_like(held, dtype=torch.float32)
        for source in blocks.sources():
            arriving = _RingShift(held, blocks.group) if source != blocks.last else None
            for mine, theirs, is_diagonal in blocks.pairs(source):
                keys, values = held[0][..., theirs, :].float(), held[1][..., theirs, :].float()
                scores = _scores(query[..., mine, :], keys, scale, is_diagonal)
                weights = torch.exp(scores - total[..., mine].unsqueeze(-1))
                here = grad[..., mine, :]
                carried[1][..., theirs, :] += weights.transpose(-1, -2) @ here
                change = weights * (here @ values.transpose(-1, -2) - inner[..., mine].unsqueeze(-1)) * scale
                grad_query[..., mine, :] += change @ keys
                carried[0][..., theirs, :] += change.transpose(-1, -2) @ query[..., mine, :].float()
            carried = _RingShift(carried, blocks.group).wait()
            if arriving is not None:
                held = arriving.wait()
        kind = query.dtype
        return grad_query.to(kind), carried[0].to(kind), carried[1].to(kind), None, None, None


class _Blocks:
    """The blocks of the score matrix that this rank computes: those not hidden by the mask."""

    def __init__(self, local_length: int, group: dist.ProcessGroup, is_causal: bool) -> None:
        self.group, self._is_causal = group, is_causal
        self._length = local_length * group.size()
        self.last = (group.rank() + 1) % group.size()

    def sources(self) -> list[int]:
        """The rank whose keys are here in each round, this rank first."""
        rank, size = self.group.rank(), self.group.size()
        return [(rank - round_) % size for round_ in range(size)]

    def pairs(self, source: int) -> list[tuple[slice, slice, bool]]:
        """Pairs of own query chunks and `source`'s key chunks, and whether the causal diagonal crosses the pair."""
        found = []
        for mine, start in self._chunks(self.group.rank()):
            for theirs, other in self._chunks(source):
                if not self._is_causal or other <= start:
                    found.append((mine, theirs, self._is_causal and other == start))
        return found

    def _chunks(self, rank: int) -> list[tuple[slice, int]]:
        """Each chunk of positions on `rank`: its slice on that rank, and its first position."""
        out, place = [], 0
        for start, stop in chunks_of(self._length, rank=rank, size=self.group.size()):
            out.append((slice(place, place + stop - start), start))
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


def _scores(query: Tensor, key: Tensor, scale: float, is_diagonal: bool) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if is_diagonal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _fold(out: Tensor, total: Tensor, part: Tensor, part_total: Tensor) -> None:
    """Merge a block's result into the total so far, in place, each weighted by its share of the softmax's sum."""
    both = torch.logaddexp(total, part_total)
    out.mul_(torch.exp(total - both).unsqueeze(-1)).add_(part * torch.exp(part_total - both).unsqueeze(-1))
    total.copy_(both)
