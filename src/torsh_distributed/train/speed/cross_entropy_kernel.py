"""The Triton kernel of the fused loss: logits become their gradients where they lie, in two passes."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803
# Functions under @triton.jit are written in Triton's language, which looks like Python and has other types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 8192
"""The fastest of 2048 to 32768 on an H200, with 16 warps."""


@triton.jit
def _row(logits, targets, losses, stride, num_classes, ignored, WITH_GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its loss, and with gradients softmax minus one-hot in place of the logits; zeros if it is ignored."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(losses + row, 0.0)
        if WITH_GRADIENTS:
            for start in range(0, num_classes, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tl.store(logits + columns, 0.0, mask=columns < num_classes)
        return
    largest = float("-inf")
    total = 0.0
    for start in range(0, num_classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < num_classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(values))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(values - higher))
        largest = higher
    log_total = largest + tl.log(total)
    # A target that is not a class has no logit: its loss is NaN, which training notices.
    is_class = (target >= 0) & (target < num_classes)
    chosen = tl.load(logits + target, mask=is_class, other=float("nan")).to(tl.float32)
    tl.store(losses + row, log_total - chosen)
    if WITH_GRADIENTS:
        tl.debug_barrier()
        for start in range(0, num_classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(logits + columns, mask=columns < num_classes, other=float("-inf")).to(tl.float32)
            gradients = tl.exp(values - log_total)
            gradients = tl.where(columns == target, gradients - 1.0, gradients)
            tl.store(logits + columns, gradients, mask=columns < num_classes)


def losses_of_rows(logits: Tensor, targets: Tensor, *, ignore_index: int, with_gradients: bool) -> Tensor:
    """The loss of each row, in fp32; with gradients, `logits` (rows contiguous) becomes the gradient of their sum."""
    num_rows, num_classes = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(num_classes))
    _row[(num_rows,)](
        logits,
        targets,
        losses,
        logits.stride(0),
        num_classes,
        ignore_index,
        WITH_GRADIENTS=with_gradients,
        BLOCK=block,
        num_warps=16 if block == _MAX_BLOCK else 4,
    )
    return losses
