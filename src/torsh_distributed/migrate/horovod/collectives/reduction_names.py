"""The reductions, as Horovod names them, and the checks of what a caller passes for one."""

from __future__ import annotations

import warnings

import torch
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument


class ReductionName(str):
    """A reduction. A string, so it prints and compares as its name."""

    __slots__ = ()

    @override
    def __repr__(self) -> str:
        return f"hvd.{self}"


Average = ReductionName("Average")
Sum = ReductionName("Sum")
Adasum = ReductionName("Adasum")
Min = ReductionName("Min")
Max = ReductionName("Max")
Product = ReductionName("Product")
REDUCTIONS = (Average, Sum, Adasum, Min, Max, Product)


def chosen_reduction(op: ReductionName | str | None, average: bool | None) -> ReductionName:
    """The reduction of `op`, or of the older `average`; Average without either. Both is an error."""
    if average is None and type(op) is ReductionName:
        return op
    if average is not None:
        if op is not None:
            raise InvalidArgument("op and average exclude each other", hint="give op alone", op=op, average=average)
        warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in REDUCTIONS:
        raise InvalidArgument("unknown reduction", hint=f"use one of hvd.{', hvd.'.join(REDUCTIONS)}", op=repr(op))
    return ReductionName(op)


REDUCED_DTYPES = frozenset(
    {torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
)
"""What can be reduced."""
MOVED_DTYPES = REDUCED_DTYPES | {torch.uint8, torch.int8, torch.int16}
"""What can be gathered, broadcast and exchanged."""
