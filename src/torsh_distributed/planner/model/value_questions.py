"""Operations that fake tensors do not answer, with the one answer that a plan needs: the most work and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def answer_without_values(func: Any, args: Sequence[Any]) -> Tensor | None:
    """The result of an operation in a trace; None for one that fake tensors compute themselves.

    One random number, drawn to leave a layer out with some probability, is 1: no layer is left out. Torch's shapes of a
    grouped product are those of GPUs, which take bf16 only; here they are given for any format, as its CPU kernel has.
    """
    if func is torch.ops.aten.rand.default and not args[0]:
        return torch.tensor(1.0)  # a constant, so that a comparison with it has a value
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        left, right = args[:2]
        groups = _num_groups(left, right, args[2] if len(args) > 2 else None)
        shaped: Tensor = left.new_empty(*groups, left.shape[-2], right.shape[-1])
        return shaped
    return None


def _num_groups(left: Tensor, right: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    """The first dim of a grouped product: a result for each group, unless the rows or columns of groups join up."""
    if left.dim() != right.dim():
        return ()
    return (left.shape[0],) if offsets is None else (offsets.shape[0],)
