"""The collectives: typed, group-aware, with a deadline, in the flight recorder.

Each takes `async_op` (return a `Work` at once), `group` (default: the world) and `timeout_s` (default: the group's).
Every rank of the group calls the same operations in the same order. Tensors may have any layout; results that are not
the argument itself are new tensors. Roots are ranks of the world, as in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypedDict, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torsh_distributed.comm.algorithms.auto.choice import choose_algorithm, leaves_to_backend
from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.running import start_all_reduce
from torsh_distributed.comm.collectives.matching import are_checks_enabled, require_agreement
from torsh_distributed.comm.collectives.reduce_op import ReduceOp
from torsh_distributed.comm.collectives.work import Work, explain, group_timeout_s
from torsh_distributed.comm.groups.abort import refuse_if_aborted
from torsh_distributed.comm.measurement.flight_recorder import Record, recorder
from torsh_distributed.errors import (
    BackendNotInitialized,
    InvalidArgument,
    RankOutOfBounds,
    TensorShapeMismatch,
    TorshError,
)

R = TypeVar("R")


class Where(TypedDict, total=False):
    """On which group an operation runs, and how long it may take."""

    group: dist.ProcessGroup | None
    timeout_s: float | None


@overload
def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ...,
    *,
    async_op: Literal[False] = ...,
    algorithm: str | Algorithm | None = ...,
    deterministic: bool = ...,
    **where: Unpack[Where],
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ...,
    *,
    async_op: Literal[True],
    algorithm: str | Algorithm | None = ...,
    deterministic: bool = ...,
    **where: Unpack[Where],
) -> Work[Tensor]: ...
def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    algorithm: str | Algorithm | None = None,
    deterministic: bool = False,
    **where: Unpack[Where],
) -> Tensor | Work[Tensor]:
    """Fold `tensor` over all ranks, in place; every rank gets the result.

    `algorithm` names the way it travels (`ring`, `tree`, …, or an `Algorithm`); `auto` measures and picks; None leaves
    it to the backend. `deterministic` adds in the order of ranks: the same contributions give the same bits on every
    backend, in every layout and every time.
    """
    record = None
    group: Any = dist.group.WORLD if not where else where.get("group") if len(where) == 1 else None
    if not (group is None or deterministic or async_op or are_checks_enabled()):
        fold_of = getattr(group, "fold_of", None)  # isinstance() of a class of c10d takes five times that
        fold = None if fold_of is None else fold_of(op, tensor.dtype)
        size_bytes = num_bytes(tensor)
        if fold is not None and (algorithm is None or leaves_to_backend(algorithm, size_bytes, group)):
            record = recorder.begin("all_reduce", group.getGroupName(), size_bytes)
            try:
                is_done = group.all_reduce_now(tensor, fold)
            except (TorshError, RuntimeError) as error:
                _fail(error, group, record)
            if is_done:
                recorder.end(record)
                return tensor
    return _all_reduce(
        tensor, op, async_op=async_op, algorithm=algorithm, deterministic=deterministic, record=record, where=where
    )


def _all_reduce(
    tensor: Tensor,
    op: ReduceOp | str,
    *,
    async_op: bool,
    algorithm: str | Algorithm | None,
    deterministic: bool,
    record: Record | None,
    where: Where,
) -> Tensor | Work[Tensor]:
    """The general way; a function of its own, for one that makes functions is slower to enter."""
    reduction = _reduction(op, tensor.dtype)
    same = (tensor.dtype, tensor.shape, op)
    if algorithm is not None or deterministic:
        group = where["group"] = resolve_group(where.get("group"))
        chosen = choose_algorithm(algorithm, tensor, group, deterministic=deterministic)
        if chosen is not None:
            return run(
                f"all_reduce:{chosen.name}",
                num_bytes(tensor),
                lambda group, _: start_all_reduce(
                    tensor, ReduceOp.parse(op), chosen, group, is_async=async_op, timeout_s=where.get("timeout_s")
                ),
                lambda: tensor,
                same=same,
                async_op=async_op,
                **where,
            )
    return run(
        "all_reduce",
        num_bytes(tensor),
        lambda group, is_async: dist.all_reduce(tensor, reduction, group=group, async_op=is_async),
        lambda: tensor,
        same=same,
        record=record,
        async_op=async_op,
        **where,
    )


@overload
def reduce(
    tensor: Tensor, dst: int, op: ReduceOp | str = ..., *, async_op: Literal[False] = ..., **where: Unpack[Where]
) -> Tensor: ...
@overload
def reduce(
    tensor: Tensor, dst: int, op: ReduceOp | str = ..., *, async_op: Literal[True], **where: Unpack[Where]
) -> Work[Tensor]: ...
def reduce(
    tensor: Tensor, dst: int, op: ReduceOp | str = ReduceOp.SUM, *, async_op: bool = False, **where: Unpack[Where]
) -> Tensor | Work[Tensor]:
    """Fold `tensor` over all ranks into the one of rank `dst`, in place; elsewhere its values are then undefined."""
    reduction = _reduction(op, tensor.dtype)
    check_member(dst, "dst", where.get("group"))
    return run(
        "reduce",
        num_bytes(tensor),
        lambda group, is_async: dist.reduce(tensor, dst, reduction, group=group, async_op=is_async),
        lambda: tensor,
        same=(tensor.dtype, tensor.shape, op, dst),
        async_op=async_op,
        **where,
    )


@overload
def broadcast(tensor: Tensor, src: int, *, async_op: Literal[False] = ..., **where: Unpack[Where]) -> Tensor: ...
@overload
def broadcast(tensor: Tensor, src: int, *, async_op: Literal[True], **where: Unpack[Where]) -> Work[Tensor]: ...
def broadcast(tensor: Tensor, src: int, *, async_op: bool = False, **where: Unpack[Where]) -> Tensor | Work[Tensor]:
    """Make every rank's `tensor` equal to that of rank `src`, in place."""
    check_member(src, "src", where.get("group"))
    return run(
        "broadcast",
        num_bytes(tensor),
        lambda group, is_async: dist.broadcast(tensor, src, group=group, async_op=is_async),
        lambda: tensor,
        same=(tensor.dtype, tensor.shape, src),
        async_op=async_op,
        **where,
    )


@overload
def all_gather(tensor: Tensor, *, async_op: Literal[False] = ..., **where: Unpack[Where]) -> list[Tensor]: ...
@overload
def all_gather(tensor: Tensor, *, async_op: Literal[True], **where: Unpack[Where]) -> Work[list[Tensor]]: ...
def all_gather(tensor: Tensor, *, async_op: bool = False, **where: Unpack[Where]) -> list[Tensor] | Work[list[Tensor]]:
    """The tensors of all ranks, by rank; they have one shape. For shapes that differ see `all_gather_varsize`."""
    source = tensor.contiguous()
    gathered = [torch.empty_like(source) for _ in range(resolve_group(where.get("group")).size())]
    return run(
        "all_gather",
        num_bytes(tensor) * len(gathered),
        lambda group, is_async: dist.all_gather(gathered, source, group=group, async_op=is_async),
        lambda: gathered,
        same=(tensor.dtype, tensor.shape),
        async_op=async_op,
        **where,
    )


@overload
def gather(
    tensor: Tensor, dst: int, *, async_op: Literal[False] = ..., **where: Unpack[Where]
) -> list[Tensor] | None: ...
@overload
def gather(
    tensor: Tensor, dst: int, *, async_op: Literal[True], **where: Unpack[Where]
) -> Work[list[Tensor] | None]: ...
def gather(
    tensor: Tensor, dst: int, *, async_op: bool = False, **where: Unpack[Where]
) -> list[Tensor] | Work[list[Tensor] | None] | None:
    """The tensors of all ranks, by rank, on rank `dst`; None elsewhere."""
    world = resolve_group(where.get("group"))
    check_member(dst, "dst", world)
    source = tensor.contiguous()
    is_root = dist.get_rank() == dst
    gathered = [torch.empty_like(source) for _ in range(world.size())] if is_root else None
    return run(
        "gather",
        num_bytes(tensor) * (world.size() if is_root else 1),
        lambda group, is_async: dist.gather(source, gathered, dst, group=group, async_op=is_async),
        lambda: gathered,
        same=(tensor.dtype, tensor.shape, dst),
        async_op=async_op,
        **where,
    )


@overload
def scatter(
    tensor: Tensor,
    src: int,
    parts: Sequence[Tensor] | None = ...,
    *,
    async_op: Literal[False] = ...,
    **where: Unpack[Where],
) -> Tensor: ...
@overload
def scatter(
    tensor: Tensor, src: int, parts: Sequence[Tensor] | None = ..., *, async_op: Literal[True], **where: Unpack[Where]
) -> Work[Tensor]: ...
def scatter(
    tensor: Tensor,
    src: int,
    parts: Sequence[Tensor] | None = None,
    *,
    async_op: bool = False,
    **where: Unpack[Where],
) -> Tensor | Work[Tensor]:
    """Fill `tensor` with this rank's entry of the `parts` that rank `src` gives; the others give none."""
    world = resolve_group(where.get("group"))
    check_member(src, "src", world)
    is_root = dist.get_rank() == src
    if is_root != (parts is not None) or (parts is not None and len(parts) != world.size()):
        raise InvalidArgument(
            "scatter takes one part for each rank, on the source rank alone",
            hint=f"pass {world.size()} parts on rank {src} and none elsewhere",
            src=src,
            rank=dist.get_rank(),
            num_parts=None if parts is None else len(parts),
        )
    sources = None if parts is None else [part.contiguous() for part in parts]
    return run(
        "scatter",
        num_bytes(tensor),
        lambda group, is_async: dist.scatter(tensor, sources, src, group=group, async_op=is_async),
        lambda: tensor,
        same=(tensor.dtype, tensor.shape, src),
        async_op=async_op,
        **where,
    )


@overload
def reduce_scatter(
    tensor: Tensor, op: ReduceOp | str = ..., *, async_op: Literal[False] = ..., **where: Unpack[Where]
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor, op: ReduceOp | str = ..., *, async_op: Literal[True], **where: Unpack[Where]
) -> Work[Tensor]: ...
def reduce_scatter(
    tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, async_op: bool = False, **where: Unpack[Where]
) -> Tensor | Work[Tensor]:
    """This rank's part of the fold of `tensor` over all ranks. Dim 0 is split evenly, in order of rank."""
    world = resolve_group(where.get("group"))
    reduction = _reduction(op, tensor.dtype)
    _check_splits(tensor, world.size(), "reduce_scatter")
    source = tensor.contiguous()
    part = source.new_empty((source.shape[0] // world.size(), *source.shape[1:]))
    return run(
        "reduce_scatter",
        num_bytes(tensor),
        lambda group, is_async: _reduce_scatter_single(part, source, reduction, group=group, async_op=is_async),
        lambda: part,
        same=(tensor.dtype, tensor.shape, op),
        async_op=async_op,
        **where,
    )


@overload
def all_to_all(
    tensor: Tensor,
    input_splits: Sequence[int] | None = ...,
    output_splits: Sequence[int] | None = ...,
    *,
    async_op: Literal[False] = ...,
    **where: Unpack[Where],
) -> Tensor: ...
@overload
def all_to_all(
    tensor: Tensor,
    input_splits: Sequence[int] | None = ...,
    output_splits: Sequence[int] | None = ...,
    *,
    async_op: Literal[True],
    **where: Unpack[Where],
) -> Work[Tensor]: ...
def all_to_all(
    tensor: Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    **where: Unpack[Where],
) -> Tensor | Work[Tensor]:
    """Send rows of `tensor` to every rank and return the rows received, in order of rank.

    Rows are split evenly, or by `input_splits` (rows to each rank) and `output_splits` (rows from each rank).
    """
    world = resolve_group(where.get("group"))
    if (input_splits is None) != (output_splits is None):
        raise InvalidArgument("give both input_splits and output_splits, or neither", hint="even splits need neither")
    if input_splits is None or output_splits is None:
        _check_splits(tensor, world.size(), "all_to_all")
        num_rows = tensor.shape[0]
    else:
        for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
            if len(splits) != world.size() or any(rows < 0 for rows in splits):
                raise InvalidArgument(
                    f"{name} must give a number of rows for each of the {world.size()} ranks", got=list(splits)
                )
        if sum(input_splits) != tensor.shape[0]:
            raise TensorShapeMismatch(
                f"input_splits add up to {sum(input_splits)} rows, but the tensor has {tensor.shape[0]}",
                input_splits=list(input_splits),
                shape=tensor.shape,
            )
        num_rows = sum(output_splits)
    source = tensor.contiguous()
    received = source.new_empty((num_rows, *source.shape[1:]))
    sizes = (
        None if output_splits is None else list(output_splits),
        None if input_splits is None else list(input_splits),
    )
    return run(
        "all_to_all",
        num_bytes(tensor),
        lambda group, is_async: dist.all_to_all_single(received, source, *sizes, group=group, async_op=is_async),
        lambda: received,
        same=(tensor.dtype, tensor.shape[1:]),
        async_op=async_op,
        **where,
    )


def barrier(*, group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
    """Return when every rank of the group has called it; OperationTimeout names those that did not come."""
    run(
        "barrier",
        0,
        lambda group, is_async: dist.barrier(group=group, async_op=is_async),
        lambda: None,
        same=(),
        async_op=False,
        group=group,
        timeout_s=timeout_s,
    )


Start = Callable[[dist.ProcessGroup, bool], dist.Work | None]


def run(
    op: str,
    size_bytes: int,
    start: Start,
    finish: Callable[[], R],
    *,
    async_op: bool,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
    peer: int | None = None,
    same: tuple[object, ...] | None = None,
    record: Record | None = None,
) -> R | Work[R]:
    """Record an operation, start it, and wait for it unless `async_op`; the one way to the backend.

    `start(group, is_async)` calls c10d; `finish()` makes the result. Without a deadline of its own a synchronous call
    goes to the backend as such: ours then work in the caller's thread, without a hop to another. `same` holds what must
    be equal on all ranks; with TORSH_DEBUG=1 it is compared first. `record` is given where it was begun already.
    """
    chosen = resolve_group(group)
    record = record or recorder.begin(op, chosen.group_name, size_bytes, peer)
    try:
        refuse_if_aborted(chosen, op)
        if same is not None and are_checks_enabled():
            limit_s = group_timeout_s(chosen) if timeout_s is None else timeout_s
            require_agreement(chosen, record, f"{op}{_shown(same)}", limit_s)
        pending = start(chosen, async_op or timeout_s is not None)
    except (TorshError, RuntimeError) as error:
        _fail(error, chosen, record, timeout_s)
    if pending is None and not async_op:  # the short way of every synchronous call without a deadline of its own
        result = finish()
        recorder.end(record)
        return result
    work = Work(pending, finish, record=record, group=chosen, timeout_s=timeout_s)
    return work if async_op else work.wait()


def _fail(
    error: TorshError | RuntimeError, group: dist.ProcessGroup, record: Record, timeout_s: float | None = None
) -> NoReturn:
    """Note it and raise it, in our words where it is not ours."""
    explained = error if isinstance(error, TorshError) else explain(error, group, record, record.start_s, timeout_s)
    recorder.end(record, explained)
    if explained is error:
        raise error
    raise explained from error


def _shown(same: tuple[object, ...]) -> tuple[object, ...]:
    """As people read it; made only where it is compared."""
    words = {torch.Size: tuple, ReduceOp: str}
    return tuple(words.get(type(part), lambda part: part)(part) for part in same)


# torch 2.13 renames it and warns about the old name; 2.11 has only the old one. Drop with support for torch < 2.13.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group meant: the given one, or the world; raises on ranks that are not its members."""
    if not dist.is_initialized():
        raise BackendNotInitialized("a collective needs the process group")
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    if not isinstance(chosen, dist.ProcessGroup):  # torch gives non-members an int in place of the group
        raise InvalidArgument(
            "this rank is not a member of the group", hint="only members call its collectives", rank=dist.get_rank()
        )
    return chosen


@functools.cache  # of every name and dtype there is: a small collective takes microseconds, so does this
def _reduction(op: ReduceOp | str, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
    chosen = ReduceOp.parse(op)
    chosen.check(dtype)
    return chosen.to_torch()


def num_bytes(tensor: Tensor) -> int:
    """The size of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def check_member(rank: int, name: str, group: dist.ProcessGroup | None) -> None:
    """Raise RankOutOfBounds unless the rank of the world belongs to the group."""
    members = dist.get_process_group_ranks(resolve_group(group))
    if rank not in members:
        raise RankOutOfBounds(
            f"{name} {rank} is not a rank of the group", hint="roots are ranks of the world", rank=rank, group=members
        )


def _check_splits(tensor: Tensor, num_ranks: int, operation: str) -> None:
    if tensor.dim() == 0 or tensor.shape[0] % num_ranks:
        raise TensorShapeMismatch(
            f"{operation} splits dim 0 evenly over {num_ranks} ranks, and it does not divide",
            hint=f"pad dim 0 to a multiple of {num_ranks}",
            shape=tensor.shape,
            num_ranks=num_ranks,
        )
