"""How an operation is called: resolve its group, record it, start it on the backend, wait, explain failures.

Each operation takes `async_op` (return a `Work` at once), `group` (default: the world) and `timeout_s` (default: the
group's). Every rank of the group calls the same operations in the same order. Tensors may have any layout; results that
are not the argument itself are new tensors. Roots are ranks of the world, as in torch. A name that ends in `_single`
works on the rows (dim 0) of one tensor, as torch's does.

With TORSH_DEBUG=1 ranks compare what they are about to do, so a mistake is an error and not a hang.
Every collective is announced in the store, apart from the data plane, and runs only if all announcements are equal.
It costs a few store round trips per collective: use it to find a bug, not for training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.work import Work, explain, group_timeout_s
from torsh_distributed.comm.groups.abort import refuse_if_aborted
from torsh_distributed.comm.meeting.store_meeting import wait_for_keys
from torsh_distributed.comm.recording.flight_recorder import OperationRecord, in_thread, recorder
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import (
    BackendNotInitialized,
    InvalidArgument,
    OperationTimeout,
    RankOutOfBounds,
    TensorShapeMismatch,
    TorshError,
)

_is_enabled = False


def enable_checks(is_enabled: bool) -> None:
    """Turn the comparison on or off in this process; `init()` turns it on if TORSH_DEBUG is set."""
    global _is_enabled
    _is_enabled = is_enabled


def are_checks_enabled() -> bool:
    """Whether every collective is compared across ranks first."""
    return _is_enabled


def require_agreement(group: dist.ProcessGroup, record: OperationRecord, what: str, timeout_s: float) -> None:
    """Raise TensorShapeMismatch on every rank, naming both sides, unless all ranks announce `what`.

    Called by every member before its collective number `record.sequence`.
    """
    store = group.get_group_store()
    members = dist.get_process_group_ranks(group)
    prefix = f"agreement/{record.sequence}"
    me = group.rank()
    store.set(f"{prefix}/{me}", json.dumps({"what": what, "where": record.call_site}))
    deadline = time.monotonic() + timeout_s
    said: list[dict[str, str]] = []
    for position, rank in enumerate(members):
        if not wait_for_keys(store, [f"{prefix}/{position}"], deadline - time.monotonic()):
            raise OperationTimeout(
                f"rank {rank} did not announce operation number {record.sequence} within {timeout_s:g} s",
                hint="it is behind, stuck or gone; this rank is at the call under `got:`",
                operation=what,
                group=record.group,
                missing_ranks=[rank],
                call_site=record.call_site,
            )
        said.append(json.loads(store.get(f"{prefix}/{position}")))
    # All ranks have announced this operation, so all have read the one before: it can go.
    store.delete_key(f"agreement/{record.sequence - 1}/{me}")
    for rank, one in zip(members, said, strict=True):
        if one["what"] != said[0]["what"]:
            raise TensorShapeMismatch(
                f"operation number {record.sequence} differs between ranks: rank {members[0]} calls "
                f"{said[0]['what']} at {said[0]['where']}, rank {rank} calls {one['what']} at {one['where']}",
                hint="all ranks must call the same operations in the same order with the same shapes and dtypes",
                group=record.group,
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
