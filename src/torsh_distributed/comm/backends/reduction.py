"""From c10d's reductions to ours, checked before anything is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import InvalidArgument

# By the hash of a torch ReduceOp, which is c10d's number and by far the cheapest way to ask one what it is.
_BY_NUMBER = {
    hash(getattr(dist.ReduceOp, name)): op
    for name, op in {
        "SUM": ReduceOp.SUM,
        "AVG": ReduceOp.MEAN,
        "PRODUCT": ReduceOp.PRODUCT,
        "MIN": ReduceOp.MIN,
        "MAX": ReduceOp.MAX,
        "BAND": ReduceOp.BAND,
        "BOR": ReduceOp.BOR,
        "BXOR": ReduceOp.BXOR,
    }.items()
}
_PREMUL_SUM = hash(dist.ReduceOp.PREMUL_SUM)
# Sums of truth values are "any", products "all": the bitwise ops of the same meaning never leave 0 and 1.
_OF_BOOLS = {
    ReduceOp.SUM: ReduceOp.BOR,
    ReduceOp.MAX: ReduceOp.BOR,
    ReduceOp.PRODUCT: ReduceOp.BAND,
    ReduceOp.MIN: ReduceOp.BAND,
}
_checked: dict[tuple[int, torch.dtype], ReduceOp] = {}


def parse_reduction(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> ReduceOp:
    """The op that a wire has to do for this c10d op and dtype; InvalidArgument if the pair has no meaning.

    PREMUL_SUM becomes a sum: the caller multiplies first, see `factor_of`. Bools reduce bitwise.
    """
    number = hash(op)
    known = _checked.get((number, dtype))
    if known is not None:
        return known
    if number == _PREMUL_SUM:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise InvalidArgument(
                f"premul_sum is not defined for {dtype}",
                hint="convert the tensor to a floating type first",
                dtype=str(dtype),
            )
        ours = ReduceOp.SUM
    elif number in _BY_NUMBER:
        ours = _BY_NUMBER[number]
        ours.check(dtype)
    else:
        raise InvalidArgument("unknown reduction", hint="use one of torch.distributed.ReduceOp", op=str(op))
    if dtype == torch.bool:
        ours = _OF_BOOLS.get(ours, ours)
    _checked[number, dtype] = ours
    return ours


def factor_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> float | Tensor | None:
    """What PREMUL_SUM multiplies with, None for every other op."""
    if hash(op) != _PREMUL_SUM:
        return None
    # The factor has no accessor in every torch we support, but the op pickles with it.
    state: tuple[object, float | Tensor | None] = op.__getstate__()  # type: ignore[assignment]  # not in torch's stubs
    factor = state[1]
    if factor is None:
        raise InvalidArgument(
            "PREMUL_SUM needs a factor", hint="make the op with torch.distributed._make_nccl_premul_sum(factor)"
        )
    return factor
