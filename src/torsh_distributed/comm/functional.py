"""Collectives with a gradient: for losses that go through what other ranks computed.

The gradient is that of the sum of all ranks' losses: backward runs the opposite collective, so every rank of the group
calls backward, in the same order. No input is changed, and a second derivative works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives import moves, reductions
from torsh_distributed.comm.collectives.call import check_member, resolve_group
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import InvalidArgument

Group = dist.ProcessGroup | None


def all_reduce(tensor: Tensor, op: ReduceOp | str = "sum", *, group: Group = None) -> Tensor:
    """The sum or mean over ranks, on every rank. Backward: the same of the gradients."""
    out: Tensor = _DifferentiableAllReduce.apply(tensor, _linear(op), resolve_group(group))  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def all_gather(tensor: Tensor, *, group: Group = None) -> Tensor:
    """The ranks' rows one after the other, (ranks x rows, …). Backward: each rank gets the sum over its rows."""
    out: Tensor = _DifferentiableAllGather.apply(tensor, resolve_group(group))  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def reduce_scatter(tensor: Tensor, op: ReduceOp | str = "sum", *, group: Group = None) -> Tensor:
    """This rank's rows of the sum or mean over ranks, (rows / ranks, …). Backward: the gradients are gathered."""
    chosen, whole = resolve_group(group), _linear(op)
    out: Tensor = _DifferentiableReduceScatter.apply(tensor, chosen)  # type: ignore[no-untyped-call]  # untyped in torch
    return out / chosen.size() if whole is ReduceOp.MEAN else out


def all_to_all(
    tensor: Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    group: Group = None,
) -> Tensor:
    """Rows exchanged between all ranks, as `all_to_all_single`. Backward: the gradients go the way back."""
    splits = [None if sizes is None else list(sizes) for sizes in (input_splits, output_splits)]
    out: Tensor = _DifferentiableAllToAll.apply(tensor, *splits, resolve_group(group))  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def broadcast(tensor: Tensor, src: int, *, group: Group = None) -> Tensor:
    """The tensor of world rank `src`, on every rank. Backward: it gets the sum of the gradients, the others zeros."""
    check_member(src, "src", group)
    # Not times 0: what others hold may be NaN. Their gradient, through `where`, is zero.
    mine = tensor if dist.get_rank() == src else torch.where(torch.zeros_like(tensor, dtype=torch.bool), tensor, 0)
    return all_reduce(mine, group=group)


def _linear(op: ReduceOp | str) -> ReduceOp:
    parsed = ReduceOp.parse(op)
    if parsed not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise InvalidArgument(
            f"{parsed.value} over ranks has no gradient here",
            hint='use "sum" or "mean", or gather the values and reduce them with torch',
            op=parsed.value,
        )
    return parsed


class _DifferentiableAllReduce(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, op: ReduceOp, group: dist.ProcessGroup) -> Tensor:
        ctx.op, ctx.group = op, group
        return reductions.all_reduce(tensor.clone(memory_format=torch.contiguous_format), op, group=group)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.op, group=ctx.group), None, None


class _DifferentiableAllGather(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return moves.all_gather_single(tensor, group=group)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, group=ctx.group), None


class _DifferentiableReduceScatter(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reductions.reduce_scatter_single(tensor.contiguous(), group=group)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, group=ctx.group), None


class _DifferentiableAllToAll(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, tensor: Tensor, inputs: list[int] | None, outputs: list[int] | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (outputs, inputs), group
        return moves.all_to_all_single(tensor.contiguous(), inputs, outputs, group=group)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_to_all(grad, *ctx.splits, group=ctx.group), None, None, None
