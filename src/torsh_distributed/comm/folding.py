"""What a reduction does to tensors, for every dtype that torch knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torsh_distributed.comm.reduce_op import ReduceOp

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
# torch stores these dtypes but does not add them; signed integers of the same size have the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def fold_into(total: Tensor, incoming: Tensor, op: ReduceOp, *, is_incoming_first: bool = False) -> None:
    """total = total (op) incoming, in place; a mean is folded as a sum, see `finish_fold`.

    `is_incoming_first` swaps the operands: ranks that fold in one order get the same bits, also of NaNs and zeros.
    """
    fold = _FOLDS[op]
    if total.dtype in _SIGNED:
        total, incoming = total.view(_SIGNED[total.dtype]), incoming.view(_SIGNED[total.dtype])
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            # Flipping the sign bit turns the order of unsigned numbers into that of signed ones, and back.
            flip = torch.iinfo(total.dtype).min
            fold(total.bitwise_xor_(flip), incoming.bitwise_xor(flip), out=total)
            total.bitwise_xor_(flip)
            return
    first, second = (incoming, total) if is_incoming_first else (total, incoming)
    if total.dtype.is_floating_point and total.element_size() == 1:
        total.copy_(fold(first.float(), second.float()))
        return
    fold(first, second, out=total)


def finish_fold(total: Tensor, op: ReduceOp, num_ranks: int) -> None:
    """What remains once all are folded: a mean divides its sum; one of integers drops the fraction, as NCCL's does."""
    if op is ReduceOp.MEAN:
        if not (total.dtype.is_floating_point or total.dtype.is_complex):
            if total.dtype in _SIGNED:  # nor does torch divide them
                total.copy_(torch.from_numpy(total.cpu().numpy() // num_ranks))
            else:
                total.div_(num_ranks, rounding_mode="trunc")
        elif total.element_size() == 1:
            total.copy_(total.float() / num_ranks)
        else:
            total.div_(num_ranks)


def fold_all(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Reduce tensors of one shape and dtype into a new one, in order; 8- and 16-bit floats in single precision."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        fold_into(total, tensor.to(wide), op)
    finish_fold(total, op, len(tensors))
    return total.to(dtype)
