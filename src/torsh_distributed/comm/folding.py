"""What a reduction does to two buffers, for every dtype that torch knows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torsh_distributed.comm.collectives.reduce_op import ReduceOp

_FOLDS: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# torch stores these but does not add them: integers have the bits of their signed twins.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def fold_into(total: Tensor, incoming: Tensor, op: ReduceOp) -> None:
    """total = total (op) incoming, in place; `incoming` may be overwritten. A mean is folded as a sum."""
    fold = _FOLDS[op]
    if total.dtype in _SIGNED:
        total, incoming = total.view(_SIGNED[total.dtype]), incoming.view(_SIGNED[total.dtype])
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            # Flipping the sign bit turns the order of unsigned numbers into that of signed ones, and back.
            flip = torch.iinfo(total.dtype).min
            fold(total.bitwise_xor_(flip), incoming.bitwise_xor_(flip), out=total)
            total.bitwise_xor_(flip)
            return
    if total.dtype.is_floating_point and total.element_size() == 1:
        total.copy_(fold(total.float(), incoming.float()))
        return
    fold(total, incoming, out=total)


def finish_fold(total: Tensor, op: ReduceOp, num_ranks: int) -> None:
    """What remains once all are folded: a mean divides its sum."""
    if op is ReduceOp.MEAN:
        if total.element_size() == 1:
            total.copy_(total.float() / num_ranks)
        else:
            total.div_(num_ranks)
