"""Operations of two traces, for two samples and for three, as rows that hold for any number of samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torsh_distributed.planner.model.model_profile import BatchAmount, OperationRow
from torsh_distributed.planner.model.operation_trace import TracedOperation


def operation_rows(first: Sequence[TracedOperation], second: Sequence[TracedOperation]) -> tuple[OperationRow, ...]:
    """The operations of both traces, paired in order; equal pairs are one row.

    Where the traces differ in more than sizes, amounts are taken to grow with the samples.
    """
    names = [[one.name for one in traced] for traced in (first, second)]
    pairs = zip(first, second, strict=True) if names[0] == names[1] else ((one, _half_more(one)) for one in first)
    return tuple(_row(one, two, count) for (one, two), count in Counter(pairs).items())


def _half_more(one: TracedOperation) -> TracedOperation:
    shape = None if one.shape is None else (one.shape[0], one.shape[1] * 3 // 2, *one.shape[2:])
    return TracedOperation(one.name, one.flops * 3 // 2, one.moved * 3 // 2, shape)


def _row(one: TracedOperation, two: TracedOperation, count: int) -> OperationRow:
    shape = None
    if one.shape is not None and two.shape is not None:
        amounts = [BatchAmount.through(*ends) for ends in zip(one.shape, two.shape, strict=True)]
        shape = (amounts[0], amounts[1], amounts[2], amounts[3])
    return OperationRow(
        name=one.name,
        count=count,
        flops=BatchAmount.through(one.flops, two.flops),
        moved=BatchAmount.through(one.moved, two.moved),
        shape=shape,
    )
