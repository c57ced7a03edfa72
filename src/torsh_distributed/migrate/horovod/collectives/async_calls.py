"""The asynchronous operations: each returns a handle for `poll` and `synchronize`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.operation_submission import (
    ALL_RESULTS,
    NEW_TENSORS,
    OperationResults,
    OperationTerms,
    all_results,
    repeat_reduction,
    submit,
    synchronize,
)
from torsh_distributed.migrate.horovod.collectives.reduction_names import (
    Adasum,
    Average,
    ReductionName,
    Sum,
    chosen_reduction,
)
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, PendingOp, Request
from torsh_distributed.migrate.horovod.process_sets import (
    ProcessSet,
    global_process_set,
    registered_set,
    set_ranks,
    set_size,
    world_rank_of,
)
from torsh_distributed.migrate.horovod.world_state import world

_CALLS_BETWEEN_JOINS = 10**12
"""More than there are: unnamed operations before and after a join never have the same number."""


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this. Operations in flight do not hold it up."""
    synchronize(submit(OpKind.BARRIER, [], "all", process_set, results=OperationResults(finish=_nothing)))


def _nothing(_: list[Any]) -> None:
    return None


def join(device: int = -1) -> int:
    """Take part in the all-reduces of the other ranks, with zeros, until every rank has called this.

    For ranks that run out of data first. Means are still over all ranks. Returns the rank that came last. `device` is
    Horovod's: zeros are made on the device of the operation.
    """
    joined = registered_set(global_process_set)
    op = PendingOp(Request("join", OpKind.JOIN), [])
    joined.engine.submit(op)
    last = joined.engine.wait(op)
    # Ranks have made different numbers of calls; from here on they make the same again.
    joined.num_joins += 1
    joined.unnamed = itertools.count(joined.num_joins * _CALLS_BETWEEN_JOINS)
    return world().members.index(last)


# --- allreduce ------------------------------------------------------------------------------------------------


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor over the ranks; the result is a new tensor."""
    said = (average, op, prescale_factor, postscale_factor)
    handle = None if name is None else repeat_reduction(tensor, name, said, process_set, is_in_place=False)
    if handle is not None:
        return handle
    chosen = chosen_reduction(op, average)
    return _reduce([tensor], None, name, chosen, prescale_factor, postscale_factor, process_set, said=said)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`allreduce_async` in place."""
    said = (average, op, prescale_factor, postscale_factor)
    handle = None if name is None else repeat_reduction(tensor, name, said, process_set, is_in_place=True)
    if handle is not None:
        return handle
    chosen = chosen_reduction(op, average)
    return _reduce([tensor], [tensor], name, chosen, prescale_factor, postscale_factor, process_set, said=said)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors as one operation: all or none; the result is a tuple of new tensors."""
    chosen = chosen_reduction(op, average)
    return _reduce(_some(tensors), None, name, chosen, prescale_factor, postscale_factor, process_set, is_group=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`grouped_allreduce_async` in place."""
    chosen, given = chosen_reduction(op, average), _some(tensors)
    return _reduce(given, given, name, chosen, prescale_factor, postscale_factor, process_set, is_group=True)


def _reduce(
    tensors: list[Tensor],
    outputs: list[Tensor] | None,
    name: str | None,
    op: ReductionName,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_group: bool = False,
    said: tuple[Any, ...] | None = None,
) -> int:
    kind = OpKind.ALLREDUCE
    if op == Adasum:
        _check_adasum(tensors, process_set)
        kind = OpKind.ADASUM
    if op in (Average, Adasum) and torch.bool in [tensor.dtype for tensor in tensors]:
        raise InvalidArgument(
            "Tensor type torch.BoolTensor is not supported by this reduction.",
            hint="use hvd.Max (any), hvd.Min (all) or hvd.Sum (any)",
            op=op,
        )
    return submit(
        kind,
        tensors,
        name,
        process_set,
        OperationTerms(op=op, prescale=float(prescale), postscale=float(postscale)),
        OperationResults(outputs=outputs, finish=all_results if is_group else None),
        label="grouped_allreduce" if is_group else "allreduce",
        said=said if kind == OpKind.ALLREDUCE and name is not None else None,
    )


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum works on the global process set only")
    num_ranks = len(set_ranks(process_set))
    if num_ranks & (num_ranks - 1):
        raise NotImplementedError(f"Adasum needs a power of two of ranks, and there are {num_ranks}")
    if any(not tensor.dtype.is_floating_point for tensor in tensors):
        raise InvalidArgument("Adasum is defined for floating-point tensors", hint="use hvd.Sum")


def _some(tensors: Sequence[Tensor]) -> list[Tensor]:
    given = list(tensors)
    if not given:
        raise InvalidArgument("a grouped operation needs at least one tensor")
    return given


# --- copies ---------------------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenate the tensors of all ranks along dim 0, whose size may differ from rank to rank."""
    return submit(OpKind.ALLGATHER, _with_rows([tensor]), name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`allgather_async` of several tensors as one operation; the result is a tuple."""
    return submit(
        OpKind.ALLGATHER, _with_rows(_some(tensors)), name, process_set, results=ALL_RESULTS, label="grouped_allgather"
    )


def _with_rows(tensors: list[Tensor]) -> list[Tensor]:
    if any(tensor.dim() == 0 for tensor in tensors):
        # A single value is one row, as in Horovod.
        return [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    return tensors


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The tensor of `root_rank`, a rank of the world, as a new tensor on every rank."""
    return submit(OpKind.BROADCAST, [tensor], name, process_set, OperationTerms(root=_root(root_rank, process_set)))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`broadcast_async` in place."""
    terms = OperationTerms(root=_root(root_rank, process_set))
    return submit(OpKind.BROADCAST, [tensor], name, process_set, terms, OperationResults(outputs=[tensor]))


def _root(root_rank: int, process_set: ProcessSet) -> int:
    ranks = set_ranks(process_set)
    if root_rank not in ranks:
        raise InvalidArgument(
            f"root rank {root_rank} is not in the process set",
            hint="root_rank is a rank of the world, also for a smaller set",
            root_rank=root_rank,
            ranks=ranks,
        )
    return world_rank_of(root_rank)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows to every rank; the result is a pair: the rows received, and how many came from each rank."""
    num_ranks = len(set_ranks(process_set))
    rows = checked_splits(tensor, splits, num_ranks)
    return submit(OpKind.ALLTOALL, [tensor], name, process_set, OperationTerms(splits=tuple(rows)), ALL_RESULTS)


def checked_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, num_ranks: int) -> list[int]:
    """Rows for each rank; raises InvalidArgument if they do not fit the tensor."""
    if tensor.dim() == 0:
        raise InvalidArgument("alltoall needs a tensor of one dim or more")
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if tensor.shape[0] % num_ranks:
            raise InvalidArgument(
                f"alltoall without splits needs dim 0 to be a multiple of the {num_ranks} ranks",
                hint="pass splits",
                shape=tensor.shape,
            )
        return [tensor.shape[0] // num_ranks] * num_ranks
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32:
            raise InvalidArgument("alltoall takes splits of dtype int32", got=splits.dtype)
        splits = splits.tolist()
    rows = [int(count) for count in splits]
    if len(rows) != num_ranks or any(count < 0 for count in rows) or sum(rows) > tensor.shape[0]:
        raise InvalidArgument(
            f"splits must give rows for each of the {num_ranks} ranks, together at most those of the tensor",
            splits=rows,
            shape=tensor.shape,
        )
    return rows


# --- reducescatter --------------------------------------------------------------------------------------------


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReductionName = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce over the ranks and keep this rank's rows; if they do not divide, the first ranks get one more."""
    return _scatter([tensor], name, op, prescale_factor, postscale_factor, process_set, is_group=False)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReductionName = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """`reducescatter_async` of several tensors as one operation; the result is a tuple."""
    return _scatter(_some(tensors), name, op, prescale_factor, postscale_factor, process_set, is_group=True)


def _scatter(
    tensors: list[Tensor],
    name: str | None,
    op: ReductionName,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_group: bool,
) -> int:
    if op not in (Average, Sum):
        raise RuntimeError(f"reducescatter knows hvd.Average and hvd.Sum, not hvd.{op}")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise InvalidArgument("reducescatter needs tensors of one dim or more")
    if any(tensor.dtype == torch.bool for tensor in tensors):
        raise InvalidArgument("Tensor type torch.BoolTensor is not supported.", hint="convert the tensor first")
    return submit(
        OpKind.REDUCESCATTER,
        tensors,
        name,
        process_set,
        OperationTerms(op=str(op), prescale=float(prescale), postscale=float(postscale)),
        ALL_RESULTS if is_group else NEW_TENSORS,
        label="grouped_reducescatter" if is_group else "reducescatter",
    )


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReductionName = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Sum or average a sparse tensor; returns a function that waits and returns the sparse result."""
    if not tensor.is_sparse:
        raise InvalidArgument("sparse_allreduce_async takes a sparse tensor", hint="call allreduce_async")
    if op not in (Average, Sum):
        raise InvalidArgument("sparse tensors can be summed or averaged", op=str(op))
    compact = tensor.detach() if tensor.is_coalesced() else tensor.detach().coalesce()
    indices = allgather_async(
        compact.indices().t().contiguous(), None if name is None else f"{name}.indices", process_set
    )
    values = allgather_async(compact.values().contiguous(), None if name is None else f"{name}.values", process_set)
    divisor = set_size(process_set) if op == Average else 1

    def wait() -> Tensor:
        all_indices, all_values = synchronize(indices), synchronize(values)
        if divisor > 1:
            all_values = all_values / divisor
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape)

    return wait
