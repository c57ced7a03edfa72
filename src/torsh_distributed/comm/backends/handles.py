"""The handles that operations return: finished or pending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from torsh_distributed.comm.recording.flight_recorder import OperationRecord, recorder
from torsh_distributed.errors import OperationTimeout

# c10d passes zero for "as long as the operation itself may take".
_NO_TIMEOUT = timedelta(0)


class FinishedWork(dist.Work):
    """An operation that was done when the call returned."""

    def __init__(self, outputs: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)

    @override
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    @override
    def is_completed(self) -> bool:
        return True

    @override
    def is_success(self) -> bool:
        return True

    @override
    def exception(self) -> None:
        return None

    @override
    def result(self) -> list[Tensor]:
        return self._outputs

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class PendingWork(dist.Work):
    """An operation that the group's thread completes, or the thread that waits for it.

    A waiter calls `help_with(work, timeout_s)`, which works towards completion and returns when the work is complete
    or the time is over. So a caller that waits at once does the work itself, without a hop to another thread. The
    outputs are valid only after a wait that did not raise.
    """

    def __init__(self, operation: str, outputs: Sequence[Tensor], help_with: HelpWith) -> None:
        super().__init__()
        self.operation = operation
        self.record: OperationRecord | None = None
        """The flight recorder's, where this work is an operation of its own."""
        self.mark: Future[None] | None = None
        """The mark of torch's profiler, ended with the operation."""
        self._outputs = list(outputs)
        self._help_with = help_with
        self._error: BaseException | None = None
        self._is_completed = False
        self._peer = -1
        self._finish: Callable[[], None] | None = None
        self._on_error: Callable[[BaseException], None] | None = None
        self._future: Future[list[Tensor]] | None = None
        self._trigger: Future[None] | None = None
        # Guards the hand-over between `complete` and `get_future`; `_done` is held until completion.
        self._guard = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def before_completion(self, finish: Callable[[], None]) -> None:
        """Run `finish` when the data has arrived, before waiters return: it copies from staging to the caller."""
        self._finish = finish

    def on_error(self, handler: Callable[[BaseException], None]) -> None:
        """Call `handler` if the operation fails, before waiters return."""
        self._on_error = handler

    def complete(self, error: BaseException | None = None, *, peer: int = -1) -> None:
        """Mark the operation as ended, with `error` if it failed. Called once."""
        if error is not None and self._on_error is not None:
            self._on_error(error)
        if error is None and self._finish is not None:
            self._finish()
        if self.record is not None:
            recorder.end_quietly(self.record, error)
        if self.mark is not None:
            self.mark.set_result(None)
        self._error, self._peer = error, peer
        self._finish = self._on_error = None
        with self._guard:
            self._is_completed = True
            trigger = self._trigger
        self._done.release()
        if trigger is not None:
            trigger.set_result(None)

    def _outcome(self, done: Future[None]) -> list[Tensor]:
        """The outputs, or the error: what the future resolves to."""
        if self._error is not None:
            raise self._error
        return self._outputs

    def wait_for_completion(self, timeout_s: float | None) -> bool:
        """Sleep until another thread completes the work; whether it did in time."""
        if self._done.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0.0)):
            self._done.release()
            return True
        return False

    @override
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when done, or raise the error.

        A `timeout` ends the waiting, not the operation, which has the group's own deadline.
        """
        if not self._is_completed:
            timeout_s = timeout.total_seconds() if timeout > _NO_TIMEOUT else None
            self._help_with(self, timeout_s)
            if not self._is_completed:
                raise OperationTimeout(
                    f"{self.operation} was not done within the {timeout_s:g} s given to wait()",
                    hint="the operation continues: wait again, or abort the group",
                    operation=self.operation,
                )
        if self._error is not None:
            raise self._error
        return True

    @override
    def is_completed(self) -> bool:
        return self._is_completed

    @override
    def is_success(self) -> bool:
        return self._is_completed and self._error is None

    @override
    def exception(self) -> BaseException | None:
        return self._error

    @override
    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def source_rank(self) -> int:
        """The group rank a receive from anywhere got its message from."""
        return self._peer

    @override
    def _source_rank(self) -> int:
        return self._peer

    @override
    def get_future(self) -> Future[list[Tensor]]:
        """A future of the outputs. It fails if the operation does, in C++ as well, where DDP's reducer waits for it.

        Why through `then`: an exception put into a torch future from Python is an ordinary value to C++, which takes
        it for tensors and crashes; one raised in a callback is an error to both.
        """
        with self._guard:
            if self._future is None:
                gpus: list[int | str | torch.device] = [*{one.device for one in self._outputs if one.is_cuda}]
                self._trigger = torch.futures.Future(devices=gpus)
                self._future = self._trigger.then(self._outcome)
                is_late = self._is_completed
            else:
                is_late = False
            future, trigger = self._future, self._trigger
        if is_late and trigger is not None:
            trigger.set_result(None)
        return future


HelpWith = Callable[[PendingWork, float | None], None]
"""What a waiter calls: it works towards completion and returns when the work is done or the time is over."""


class CombinedWork(dist.Work):
    """Several operations waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    @override
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    @override
    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    @override
    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    @override
    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    @override
    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def get_future(self) -> Future[list[Tensor]]:
        gathered = torch.futures.collect_all([work.get_future() for work in self._works])
        return gathered.then(lambda done: [tensor for one in done.value() for tensor in one.value()])
