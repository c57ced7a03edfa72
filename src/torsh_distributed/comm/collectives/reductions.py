"""Reductions: the values of all ranks become one. What holds for all operations is said in `call`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torsh_distributed.comm.algorithms.auto_choice import choose_algorithm, leaves_to_backend
from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.execution import start_all_reduce
from torsh_distributed.comm.collectives.call import (
    CallOptions,
    are_checks_enabled,
    check_even_rows,
    check_member,
    check_one_per_rank,
    fail,
    num_bytes,
    resolve_group,
    run,
)
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.comm.recording.flight_recorder import OperationRecord, recorder
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import TorshError


@overload
def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ...,
    *,
    async_op: Literal[False] = ...,
    algorithm: str | Algorithm | None = ...,
    deterministic: bool = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ...,
    *,
    async_op: Literal[True],
    algorithm: str | Algorithm | None = ...,
    deterministic: bool = ...,
    **options: Unpack[CallOptions],
) -> Work[Tensor]: ...
def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    algorithm: str | Algorithm | None = None,
    deterministic: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | Work[Tensor]:
    """Fold `tensor` over all ranks, in place; every rank gets the result.

    `algorithm` names how it travels (`ring`, `tree`, …, or an `Algorithm`); `auto` measures and picks; None leaves it
    to the backend. `deterministic` adds in the order of ranks: the same contributions give the same bits on every
    backend, in every layout and every time.
    """
    record = None
    group: Any = dist.group.WORLD if not options else options.get("group") if len(options) == 1 else None
    if not (group is None or deterministic or async_op or are_checks_enabled()):
        fold_of = getattr(group, "fold_of", None)  # isinstance() with a c10d class takes five times as long
        fold = None if fold_of is None else fold_of(op, tensor.dtype)
        size_bytes = num_bytes(tensor)
        if fold is not None and (algorithm is None or leaves_to_backend(algorithm, size_bytes, group)):
            record = recorder.begin("all_reduce", group.getGroupName(), size_bytes)
            try:
                is_done = group.all_reduce_now(tensor, fold)
            except (TorshError, RuntimeError) as error:
                fail(error, group, record)
            if is_done:
                recorder.end(record)
                return tensor
    return _all_reduce(
        tensor, op, async_op=async_op, algorithm=algorithm, deterministic=deterministic, record=record, options=options
    )


def _all_reduce(
    tensor: Tensor,
    op: ReduceOp | str,
    *,
    async_op: bool,
    algorithm: str | Algorithm | None,
    deterministic: bool,
    record: OperationRecord | None,
    options: CallOptions,
) -> Tensor | Work[Tensor]:
    """The general path; a function of its own because closures would make the short path slower to enter."""
    reduction = _reduction(op, tensor.dtype)
    same = (tensor.dtype, tensor.shape, op)
    if algorithm is not None or deterministic:
        group = options["group"] = resolve_group(options.get("group"))
        chosen = choose_algorithm(algorithm, tensor, group, deterministic=deterministic)
        if chosen is not None:
            return run(
                f"all_reduce:{chosen.name}",
                num_bytes(tensor),
                lambda group, _: start_all_reduce(
                    tensor, ReduceOp.parse(op), chosen, group, is_async=async_op, timeout_s=options.get("timeout_s")
                ),
                lambda: tensor,
                same=same,
                async_op=async_op,
                **options,
            )
    return run(
        "all_reduce",
        num_bytes(tensor),
        lambda group, is_async: dist.all_reduce(tensor, reduction, group=group, async_op=is_async),
        lambda: tensor,
        same=same,
        record=record,
        async_op=async_op,
        **options,
    )


@overload
def reduce(
    tensor: Tensor,
    dst: int,
    op: ReduceOp | str = ...,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def reduce(
    tensor: Tensor, dst: int, op: ReduceOp | str = ..., *, async_op: Literal[True], **options: Unpack[CallOptions]
) -> Work[Tensor]: ...
def reduce(
    tensor: Tensor,
    dst: int,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | Work[Tensor]:
    """Fold `tensor` over all ranks into that of rank `dst`, in place; on other ranks its values are then undefined."""
    reduction = _reduction(op, tensor.dtype)
    check_member(dst, "dst", options.get("group"))
    return run(
        "reduce",
        num_bytes(tensor),
        lambda group, is_async: dist.reduce(tensor, dst, reduction, group=group, async_op=is_async),
        lambda: tensor,
        same=(tensor.dtype, tensor.shape, op, dst),
        async_op=async_op,
        **options,
    )


@overload
def reduce_scatter(
    tensors: Sequence[Tensor],
    op: ReduceOp | str = ...,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def reduce_scatter(
    tensors: Sequence[Tensor], op: ReduceOp | str = ..., *, async_op: Literal[True], **options: Unpack[CallOptions]
) -> Work[Tensor]: ...
def reduce_scatter(
    tensors: Sequence[Tensor],
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | Work[Tensor]:
    """The fold over all ranks of the tensor that each of them gives for this rank, `tensors[group_rank]`.

    `tensors[i]` has one shape on all ranks; shapes of different i may differ.
    """
    world = resolve_group(options.get("group"))
    check_one_per_rank(tensors, world.size(), "reduce_scatter")
    reduction = _reduction(op, tensors[0].dtype)
    sources = [tensor.detach().contiguous() for tensor in tensors]
    part = torch.empty_like(sources[world.rank()])
    return run(
        "reduce_scatter",
        sum(map(num_bytes, sources)),
        lambda group, is_async: dist.reduce_scatter(part, sources, reduction, group=group, async_op=is_async),
        lambda: part,
        same=(part.dtype, tuple(tuple(source.shape) for source in sources), op),
        async_op=async_op,
        **options,
    )


@overload
def reduce_scatter_single(
    tensor: Tensor, op: ReduceOp | str = ..., *, async_op: Literal[False] = ..., **options: Unpack[CallOptions]
) -> Tensor: ...
@overload
def reduce_scatter_single(
    tensor: Tensor, op: ReduceOp | str = ..., *, async_op: Literal[True], **options: Unpack[CallOptions]
) -> Work[Tensor]: ...
def reduce_scatter_single(
    tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, async_op: bool = False, **options: Unpack[CallOptions]
) -> Tensor | Work[Tensor]:
    """This rank's rows of the fold of `tensor` over all ranks. Dim 0 is split evenly, in order of rank."""
    world = resolve_group(options.get("group"))
    reduction = _reduction(op, tensor.dtype)
    check_even_rows(tensor, world.size(), "reduce_scatter_single")
    source = tensor.contiguous()
    part = source.new_empty((source.shape[0] // world.size(), *source.shape[1:]))
    return run(
        "reduce_scatter_single",
        num_bytes(tensor),
        lambda group, is_async: c10d_reduce_scatter_single(part, source, reduction, group=group, async_op=is_async),
        lambda: part,
        same=(tensor.dtype, tensor.shape, op),
        async_op=async_op,
        **options,
    )


# torch 2.13 renames it and warns about the old name; 2.11 has only the old one. Drop with support for torch < 2.13.
c10d_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@functools.cache  # names and dtypes are few; a small collective takes microseconds, and so does this
def _reduction(op: ReduceOp | str, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
    chosen = ReduceOp.parse(op)
    chosen.check(dtype)
    return chosen.to_torch()
