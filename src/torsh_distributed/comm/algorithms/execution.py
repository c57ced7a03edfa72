"""Run an algorithm on a group: in the caller's thread, or on a background thread.

Each operation has a tag of its own, drawn in the order of calls, which is the same on every rank. So operations that
overlap never take each other's messages, and none meets the backend's collectives or messages under a user's tag.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.algorithms.base import Algorithm, Channel
from torsh_distributed.comm.recording.flight_recorder import in_thread
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.errors import InvalidArgument, OperationTimeout

FIRST_TAG = 16384
NUM_TAGS = 16000
"""Tags from 16384 to 32383 belong to algorithms; every MPI has 32767, and our backend keeps the last few."""


class _GroupState:
    """What the algorithms on a group share. Holds no reference to the group, and lives as long as the group."""

    def __init__(self) -> None:
        self.tags = itertools.cycle(range(FIRST_TAG, FIRST_TAG + NUM_TAGS))
        self.background = SerialThread("torsh-algorithms")


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()


def _state_of(group: dist.ProcessGroup) -> _GroupState:
    if group not in _states:
        _states[group] = _GroupState()
    return _states[group]


def new_channel(group: dist.ProcessGroup, timeout_s: float | None = None) -> Channel:
    """A channel of all ranks of the group, for one operation; every rank makes one at the same point of its program."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    return Channel(group, range(group.size()), tag=next(_state_of(group).tags), deadline_s=deadline_s)


def start_all_reduce(
    tensor: Tensor,
    op: ReduceOp,
    algorithm: Algorithm,
    group: dist.ProcessGroup,
    *,
    is_async: bool,
    timeout_s: float | None,
) -> dist.Work | None:
    """Fold `tensor` over the group, in place; returns a handle if `is_async`, else when it is done."""
    channel = new_channel(group, timeout_s)

    def reduce() -> None:
        with_flat(tensor, lambda flat: algorithm.all_reduce(flat, op, channel))

    return start(algorithm.name, reduce, tensor, group, is_async=is_async)


def start(
    op: str, body: Callable[[], None], tensor: Tensor, group: dist.ProcessGroup, *, is_async: bool
) -> dist.Work | None:
    """Run `body`, which moves messages on a channel of its own, now or on the group's background thread."""
    check_on_cpu(tensor)
    if not is_async:
        body()
        return None
    return _BackgroundWork(op, body, tensor, _state_of(group).background)


def with_flat(tensor: Tensor, body: Callable[[Tensor], None]) -> None:
    """Call `body` with the tensor's values as one contiguous run of numbers, and copy its result back."""
    with torch.no_grad():
        values = tensor.detach()
        flat = values.contiguous().view(-1)
        body(flat)
        if not values.is_contiguous():
            values.copy_(flat.view(values.shape))


def check_on_cpu(tensor: Tensor) -> None:
    """Named algorithms use tagged messages and fold on the CPU; nccl has no tags and needs none of them."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise InvalidArgument(
            "named algorithms and deterministic sums are for dense CPU tensors",
            hint="leave algorithm out: the backend chooses its own (nccl: NCCL_ALGO)",
            device=str(tensor.device),
            layout=str(tensor.layout),
        )


class _BackgroundWork(dist.Work):
    """The handle c10d expects, for a body that runs on the background thread."""

    def __init__(self, op: str, body: Callable[[], None], tensor: Tensor, background: SerialThread) -> None:
        super().__init__()
        self._op = op
        self._outputs: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def run() -> None:
            in_thread.is_inside = True  # this thread sends messages of recorded operations only
            body()
            self._outputs.set_result([tensor])

        self._end: Future[None] = background.submit(run)
        self._end.add_done_callback(self._hand_on_failure)

    def _hand_on_failure(self, end: Future[None]) -> None:
        error = end.exception()
        if error is not None:
            # torch takes an Exception only; an interrupt in a worker thread ends the operation like any failure.
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._outputs.set_exception(failure)  # type: ignore[arg-type]  # torch's stub says it takes a result

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() if timeout > timedelta(0) else None
        done, _ = concurrent.futures.wait([self._end], limit_s)
        if not done:
            raise OperationTimeout(
                f"{self._op} was not done within the {limit_s:g} s given to wait()", operation=self._op
            )
        self._end.result()
        return True

    @override
    def is_completed(self) -> bool:
        return self._end.done()

    @override
    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._outputs
