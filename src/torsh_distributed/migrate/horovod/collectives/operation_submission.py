"""From a call to the engine: check the tensor on this rank, name the operation, submit it, keep its handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.reduction_names import MOVED_DTYPES, REDUCED_DTYPES
from torsh_distributed.migrate.horovod.negotiation.request import DTYPE_NAMES, BucketFacts, OpKind, PendingOp, Request
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, registered_set
from torsh_distributed.migrate.horovod.world_state import world

_REDUCES = frozenset({OpKind.ALLREDUCE, OpKind.ADASUM, OpKind.REDUCESCATTER})
_MAX_REPEATED = 8192
_MAY_GATHER_BYTES = 64 * 1024
"""Operations up to this size may wait a moment for others; what is larger takes longer to send than to ask for."""


def all_results(results: list[Any]) -> tuple[Any, ...]:
    """The results of a grouped operation."""
    return tuple(results)


def repeat_reduction(
    tensor: Tensor, name: str, said: tuple[Any, ...], process_set: ProcessSet, *, is_in_place: bool
) -> int | None:
    """Submit an all-reduce of one tensor as this rank submitted it the last time, in less time; None if it differs.

    `said`: everything else that was said in the call.
    """
    state = world()
    registered = state.sets.get(process_set.process_set_id)  # type: ignore[arg-type]  # None is the key of no set
    if registered is None:
        return None
    last = registered.repeated.get(name)
    # Compared, not looked up: that takes no hashes.
    if last is None or last[0] != (said, tensor.dtype, tensor.shape, tensor.device) or not tensor.is_contiguous():
        return None
    inputs = [tensor]
    pending, engine = PendingOp(last[1], inputs, inputs if is_in_place else None), registered.engine
    assert engine is not None, "it has submitted this before"
    engine.submit(pending, may_gather=last[2])
    handle = next(state.counter)
    state.handles[handle] = pending, engine
    return handle


class OperationTerms(NamedTuple):
    """What the ranks must agree on, beside the name, the kind and the tensors; fields as in `Request`."""

    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    flags: int = 0


class OperationResults(NamedTuple):
    """What this rank does to get its results, and with them; fields as in `PendingOp`."""

    outputs: list[Tensor] | None = None
    run: Callable[..., tuple[Any, int]] | None = None
    bucket: BucketFacts | None = None
    finish: Callable[[list[Any]], Any] | None = None


NO_TERMS, NEW_TENSORS, ALL_RESULTS = OperationTerms(), OperationResults(), OperationResults(finish=all_results)


def submit(
    kind: OpKind,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    terms: OperationTerms = NO_TERMS,
    results: OperationResults = NEW_TENSORS,
    *,
    label: str | None = None,
    said: tuple[Any, ...] | None = None,
) -> int:
    """Hand an operation to the set's engine; returns its handle. Raises for what is wrong on this rank already.

    `label`: what the name starts with, if not the kind. `said`: that of `repeat_reduction`, which submits it the next
    time.
    """
    registered = registered_set(process_set)
    allowed = REDUCED_DTYPES if kind in _REDUCES else MOVED_DTYPES
    described: list[tuple[str, tuple[int, ...]]] = []
    for tensor in tensors:
        if tensor.dtype not in allowed:
            raise InvalidArgument(f"Tensor type {tensor.type()} is not supported.", hint="convert the tensor first")
        if not tensor.is_contiguous():
            raise InvalidArgument(
                "Tensor is required to be contiguous.", hint="call .contiguous() on it", shape=tensor.shape
            )
        described.append((DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
    device = "cpu" if not tensors or tensors[0].is_cpu else tensors[0].device.type
    if len(tensors) > 1 and any(tensor.device != tensors[0].device for tensor in tensors):
        raise InvalidArgument("the tensors of a grouped operation must be on one device")
    if name is None:
        name = f"noname.{next(registered.unnamed)}"
    full_name = f"{label or kind}.{name}"
    op, prescale, postscale, root, splits, flags = terms
    request = Request(full_name, kind, tuple(described), op, prescale, postscale, root, splits, device, flags)
    may_gather = bool(tensors) and request.num_bytes <= _MAY_GATHER_BYTES
    if said is not None:
        if len(registered.repeated) >= _MAX_REPEATED:
            registered.repeated.clear()
        tensor = tensors[0]
        what = (said, tensor.dtype, tensor.shape, tensor.device)
        registered.repeated[name] = what, request, may_gather
    pending = PendingOp(request, list(tensors), results.outputs)
    if results.run is not None:
        pending.run = results.run
    if results.bucket is not None:
        pending.bucket = results.bucket
    if results.finish is not None:
        pending.finish = results.finish
    registered.engine.submit(pending, may_gather=may_gather)
    state = world()
    handle = next(state.counter)
    state.handles[handle] = pending, registered.engine
    return handle


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once; also for a handle that is not known."""
    found = world().handles.get(handle)
    if found is None or found[0].is_finished():
        return True
    found[1].hurry()
    return False


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None for a handle that is not known.

    Raises HorovodInternalError, on every rank, if the ranks disagree about the operation or one of them is gone.
    """
    found = world().handles.pop(handle, None)
    if found is None:
        return handle() if callable(handle) else None  # a sparse operation is a function
    op, engine = found
    results = engine.wait(op)
    result = results[0] if op.finish is None else op.finish(results)
    if op.device_done is not None:
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())
    return result
