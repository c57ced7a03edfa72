"""How an operation is called: resolve its group, record it, start it on the backend, wait, explain failures.

Each operation takes `async_op` (return a `Work` at once), `group` (default: the world) and `timeout_s` (default: the
group's). Every rank of the group calls the same operations in the same order. Tensors may have any layout; results that
are not the argument itself are new tensors. Roots are ranks of the world, as in torch. A name that ends in `_single`
works on the rows (dim 0) of one tensor, as torch's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.matching import are_checks_enabled, require_agreement
from torsh_distributed.comm.collectives.work import Work, explain, group_timeout_s
from torsh_distributed.comm.groups.abort import refuse_if_aborted
from torsh_distributed.comm.recording.flight_recorder import OperationRecord, in_thread, recorder
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import (
    BackendNotInitialized,
    InvalidArgument,
    RankOutOfBounds,
    TensorShapeMismatch,
    TorshError,
)

R = TypeVar("R")


class CallOptions(TypedDict, total=False):
    """What every operation accepts: its group (default: the world) and its deadline (default: the group's)."""

    group: dist.ProcessGroup | None
    timeout_s: float | None


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
    record: OperationRecord | None = None,
) -> R | Work[R]:
    """Record an operation, start it, and wait for it unless `async_op`; every operation reaches its backend this way.

    `start(group, is_async)` calls c10d; `finish()` makes the result. A synchronous call without a deadline of its own
    is synchronous for the backend too: ours then work in the caller's thread. `same` holds what must be equal on all
    ranks; with TORSH_DEBUG=1 it is compared first. `record` is given if the operation has been recorded already.
    """
    chosen = resolve_group(group)
    record = record or recorder.begin(op, chosen.group_name, size_bytes, peer)
    was_inside = in_thread.is_inside
    try:
        refuse_if_aborted(chosen, op)
        if same is not None and are_checks_enabled():
            limit_s = group_timeout_s(chosen) if timeout_s is None else timeout_s
            require_agreement(chosen, record, f"{op}{_shown(same)}", limit_s)
        in_thread.is_inside = True
        pending = start(chosen, async_op or timeout_s is not None)
    except (TorshError, RuntimeError) as error:
        fail(error, chosen, record, timeout_s)
    finally:
        in_thread.is_inside = was_inside
    if pending is None and not async_op:  # the short path of a synchronous call without a deadline of its own
        result = finish()
        recorder.end(record)
        return result
    work = Work(pending, finish, record=record, group=chosen, timeout_s=timeout_s)
    return work if async_op else work.wait()


def fail(
    error: TorshError | RuntimeError, group: dist.ProcessGroup, record: OperationRecord, timeout_s: float | None = None
) -> NoReturn:
    """Record the failure and raise it; c10d's RuntimeError is raised as one of our errors."""
    explained = error if isinstance(error, TorshError) else explain(error, group, record, record.start_s, timeout_s)
    recorder.end(record, explained)
    if explained is error:
        raise error
    raise explained from error


def _shown(same: tuple[object, ...]) -> tuple[object, ...]:
    """The values as shown to people; computed only when they are compared."""
    words = {torch.Size: tuple, ReduceOp: str}
    return tuple(words.get(type(part), lambda part: part)(part) for part in same)


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, or the world; raises on ranks that are not members."""
    if not dist.is_initialized():
        raise BackendNotInitialized("a collective needs the process group")
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    if not isinstance(chosen, dist.ProcessGroup):  # torch gives non-members an int in place of the group
        raise InvalidArgument(
            "this rank is not a member of the group", hint="only members call its collectives", rank=dist.get_rank()
        )
    return chosen


def num_bytes(tensor: Tensor) -> int:
    """The size of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def check_member(rank: int, name: str, group: dist.ProcessGroup | None) -> None:
    """Raise RankOutOfBounds unless the rank of the world belongs to the group."""
    members = dist.get_process_group_ranks(resolve_group(group))
    if rank not in members:
        raise RankOutOfBounds(
            f"{name} {rank} is not a rank of the group",
            hint="roots and peers are given as ranks of the world",
            rank=rank,
            group=members,
        )


def check_even_rows(tensor: Tensor, num_ranks: int, operation: str) -> None:
    """Raise TensorShapeMismatch unless dim 0 splits evenly over the ranks."""
    if tensor.dim() == 0 or tensor.shape[0] % num_ranks:
        raise TensorShapeMismatch(
            f"{operation} splits dim 0 evenly over {num_ranks} ranks, but it does not divide",
            hint=f"pad dim 0 to a multiple of {num_ranks}",
            shape=tensor.shape,
            num_ranks=num_ranks,
        )


def check_one_per_rank(tensors: Sequence[Tensor], num_ranks: int, operation: str) -> None:
    """Raise InvalidArgument unless `tensors` holds one tensor for each rank, all of one dtype on one device."""
    if isinstance(tensors, Tensor):
        raise InvalidArgument(
            f"{operation} takes a list with one tensor for each rank, and got a single tensor",
            hint=f"call {operation}_single to split the rows of one tensor over the ranks",
            shape=tensors.shape,
        )
    if len(tensors) != num_ranks:
        raise InvalidArgument(
            f"{operation} takes one tensor for each rank", num_tensors=len(tensors), num_ranks=num_ranks
        )
    kinds = {f"{tensor.dtype} on {tensor.device}" for tensor in tensors}
    if len(kinds) > 1:
        raise InvalidArgument(f"{operation} takes tensors of one dtype on one device", got=sorted(kinds))
