"""Converts activations between whole and split: the four operations of tensor parallelism, with their backward.

Backward does to the gradient the opposite of what forward does to the activation. Every rank of the group calls them in
the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.parallel.compiling import outside_graphs
from torsh_distributed.parallel.tensor.cut import TensorCut

LAST = TensorCut(-1)


@outside_graphs
def enter_split(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A whole activation, equal on all ranks, as input of a split layer. Backward: gradients are summed."""
    out: Tensor = _EnterSplit.apply(whole, group)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


@outside_graphs
def sum_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of what each computed from its piece. Backward: the gradient is unchanged."""
    out: Tensor = _SumParts.apply(part, group)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


@outside_graphs
def gather_last(part: Tensor, whole: int, group: dist.ProcessGroup, *, cut: TensorCut = LAST) -> Tensor:
    """The whole last dim, of length `whole`, from the ranks' pieces. Backward: each rank takes its piece."""
    out: Tensor = _GatherLast.apply(part, whole, group, cut)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


@outside_graphs
def take_last(whole: Tensor, group: dist.ProcessGroup, *, cut: TensorCut = LAST) -> Tensor:
    """This rank's piece of the last dim of a whole activation. Backward: the pieces' gradients are gathered."""
    out: Tensor = _TakeLast.apply(whole, group, cut)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _EnterSplit(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0].contiguous().clone(), group=ctx.group), None


class _SumParts(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(part.contiguous().clone(), group=group)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, whole: int, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
        ctx.group, ctx.cut = group, cut
        return _gathered(part, whole, group, cut)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _piece(grads[0], ctx.group, ctx.cut), None, None, None


class _TakeLast(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
        ctx.group, ctx.whole, ctx.cut = group, whole.shape[-1], cut
        return _piece(whole, group, cut)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gathered(grads[0], ctx.whole, ctx.group, ctx.cut), None, None


def _piece(whole: Tensor, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
    return cut.part(whole, rank=group.rank(), size=group.size())


def _gathered(part: Tensor, whole: int, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
    """The whole last dim from the pieces, which are padded to one length to be sent."""
    lengths = [cut.length(whole, rank=rank, size=group.size()) for rank in range(group.size())]
    missing = lengths[0] - part.shape[-1]
    sent = torch.nn.functional.pad(part, (0, missing)) if missing else part.contiguous()
    received = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(received, sent, group=group)
    return cut.join([piece[..., :length] for piece, length in zip(received, lengths, strict=True)])
