"""Run an algorithm on a group: in the caller's thread, or behind its back.

Each operation has a tag of its own, drawn in the order of calls, which is the same on every rank. So operations that
overlap never take each other's messages, and none meets the backend's collectives or messages under a user's tag.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.channel import Lane
from torsh_distributed.comm.collectives.reduce_op import ReduceOp
from torsh_distributed.comm.scheduler import CommunicationScheduler, ScheduledWork
from torsh_distributed.errors import InvalidArgument

FIRST_TAG = 16384
NUM_TAGS = 16000
"""Tags from 16384 to 32383 belong to algorithms; every MPI has 32767, and our backend keeps the last few."""


class _GroupState:
    """What a group's composed operations share. Holds no reference to the group: it lives as long as the group."""

    def __init__(self) -> None:
        self.tags = itertools.cycle(range(FIRST_TAG, FIRST_TAG + NUM_TAGS))
        self.background = CommunicationScheduler(max_concurrent_ops=1)


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()


def _state_of(group: dist.ProcessGroup) -> _GroupState:
    if group not in _states:
        _states[group] = _GroupState()
    return _states[group]


def new_lane(group: dist.ProcessGroup, timeout_s: float | None = None) -> Lane:
    """A lane of all ranks of the group, for one operation; every rank draws one at the same point of its program."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    return Lane(group, range(group.size()), tag=next(_state_of(group).tags), deadline_s=deadline_s)


def start_all_reduce(
    tensor: Tensor,
    op: ReduceOp,
    algorithm: Algorithm,
    group: dist.ProcessGroup,
    *,
    is_async: bool,
    timeout_s: float | None,
) -> dist.Work | None:
    """Fold `tensor` over the group, in place; a handle if `is_async`, else it is done when this returns."""
    lane = new_lane(group, timeout_s)

    def reduce() -> None:
        with_flat(tensor, lambda flat: algorithm.all_reduce(flat, op, lane))

    return start(algorithm.name, reduce, tensor, group, is_async=is_async)


def start(
    op: str, body: Callable[[], None], tensor: Tensor, group: dist.ProcessGroup, *, is_async: bool
) -> dist.Work | None:
    """Run `body`, which moves messages on a lane of its own, now or in the group's background thread."""
    check_on_cpu(tensor)
    if not is_async:
        body()
        return None
    background = _state_of(group).background
    num_bytes = tensor.numel() * tensor.element_size()
    return _BackgroundWork(background.submit(op, body, num_bytes=num_bytes, group=group), tensor)


def with_flat(tensor: Tensor, body: Callable[[Tensor], None]) -> None:
    """Call `body` with the tensor's values as one contiguous run of numbers, and put back what it made of them."""
    with torch.no_grad():
        values = tensor.detach()
        flat = values.contiguous().view(-1)
        body(flat)
        if not values.is_contiguous():
            values.copy_(flat.view(values.shape))


def check_on_cpu(tensor: Tensor) -> None:
    """Named algorithms travel over tagged messages and fold on the CPU; nccl has neither tags nor a need for them."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise InvalidArgument(
            "named algorithms and deterministic sums are for dense CPU tensors",
            hint="leave algorithm out: the backend chooses its own (nccl: NCCL_ALGO)",
            device=str(tensor.device),
            layout=str(tensor.layout),
        )


class _BackgroundWork(dist.Work):
    """The handle c10d expects, on a task of the background thread."""

    def __init__(self, task: ScheduledWork[None], tensor: Tensor) -> None:
        super().__init__()
        self._task = task
        self._tensor = tensor

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._task.wait(timeout.total_seconds() if timeout > timedelta(0) else None)
        return True

    @override
    def is_completed(self) -> bool:
        return self._task.is_completed()

    @override
    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        def outputs(future: torch.futures.Future[None]) -> list[Tensor]:
            future.value()  # raises what went wrong
            return [self._tensor]

        return self._task.get_future().then(outputs)
