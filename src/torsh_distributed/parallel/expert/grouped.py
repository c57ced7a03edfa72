"""One linear layer per expert over rows sorted by expert: torch's grouped product on CUDA, else one product each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class ExpertSegment:
    """Rows `start` to `stop` belong to one expert of this rank."""

    expert: int
    start: int
    stop: int


def segments_of(counts: Sequence[Sequence[int]]) -> tuple[ExpertSegment, ...]:
    """The segments of rows sorted by source, then by expert. counts: rows by source, then by local expert."""
    flat = [(expert, count) for source in counts for expert, count in enumerate(source)]
    edges = pairwise(accumulate((count for _, count in flat), initial=0))
    return tuple(
        ExpertSegment(expert, start, stop)
        for (expert, _), (start, stop) in zip(flat, edges, strict=True)
        if stop > start
    )


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product supports these tensors, and is fast on their device."""
    is_aligned = all(size * rows.element_size() % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and is_aligned


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, ends: Tensor) -> Tensor:
    """`segmented_linear` in one kernel, for rows sorted by expert.

    counts: (experts,) rows of each, on their device; ends: (experts,) int32, where each expert's rows end (`ends_of`).
    """
    out = functional.grouped_mm(rows, weight, offs=ends)
    if bias is not None:
        out = out + bias.repeat_interleave(counts, dim=0, output_size=len(rows))
    return out


def ends_of(counts: Tensor) -> Tensor:
    """Where each expert's rows end; the same for all products over these rows."""
    return counts.cumsum(dim=0, dtype=torch.int32)


NewRows = Callable[[int, int, Tensor], Tensor]
"""Makes uninitialised rows: (number of rows, width, a tensor with the dtype and device to use)."""


def _new_rows(num_rows: int, dim: int, like: Tensor) -> Tensor:
    return like.new_empty((num_rows, dim))


def segmented_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: tuple[ExpertSegment, ...],
    new_rows: NewRows | None = None,
) -> Tensor:
    """(rows, out): each segment times its expert's matrix. weight: (experts, in, out), bias: (experts, out).

    Why not autograd over slices: the gradient of each slice would have the size of the whole stack.
    """
    makes = new_rows or _new_rows
    out: Tensor = _SegmentedLinear.apply(rows, weight, bias, segments, makes)  # type: ignore[no-untyped-call]  # in torch
    return out


class _SegmentedLinear(Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: tuple[ExpertSegment, ...],
        new_rows: NewRows,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.segments = segments
        out = new_rows(len(rows), weight.shape[2], rows)
        for segment in segments:
            here = slice(segment.start, segment.stop)
            if bias is None:
                torch.mm(rows[here], weight[segment.expert], out=out[here])
            else:
                torch.addmm(bias[segment.expert], rows[here], weight[segment.expert], out=out[here])
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = grad.new_zeros((weight.shape[0], weight.shape[2])) if needs_bias else None
        untouched = set(range(weight.shape[0]))
        for segment in ctx.segments:
            expert, here = segment.expert, slice(segment.start, segment.stop)
            if grad_rows is not None:
                torch.mm(grad[here], weight[expert].t(), out=grad_rows[here])
            if grad_weight is not None and expert in untouched:
                torch.mm(rows[here].t(), grad[here], out=grad_weight[expert])
            elif grad_weight is not None:
                grad_weight[expert].addmm_(rows[here].t(), grad[here])
            if grad_bias is not None:
                grad_bias[expert] += grad[here].sum(dim=0)
            untouched.discard(expert)
        if grad_weight is not None:
            for expert in untouched:
                grad_weight[expert].zero_()
        return grad_rows, grad_weight, grad_bias, None, None
