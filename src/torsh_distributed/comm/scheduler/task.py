"""An operation that waits for its turn, and the handle on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from enum import Enum, IntEnum, auto
from typing import Generic, TypeVar

import torch

from torsh_distributed.errors import OperationTimeout

R = TypeVar("R")


class Priority(IntEnum):
    """How urgent something is; the larger goes first."""

    LOW = 0
    NORMAL = 1
    MEDIUM = 1
    HIGH = 2
    CRITICAL = 3


class State(Enum):
    """Where a task is on its way."""

    HELD = auto()
    PENDING = auto()
    RUNNING = auto()
    OVER = auto()


class Task(Generic[R]):
    """What was submitted. `stream` names the queue within which order is kept: tasks of one stream run one by one."""

    __slots__ = (
        "call",
        "deadline_s",
        "done",
        "error",
        "future",
        "group",
        "num_bytes",
        "op",
        "peer",
        "priority",
        "result",
        "sequence",
        "started_s",
        "state",
        "stream",
        "submitted_s",
    )

    def __init__(
        self,
        op: str,
        call: Callable[[], R],
        *,
        group: str,
        peer: int | None,
        tag: int,
        num_bytes: int,
        priority: Priority,
        submitted_s: float,
        deadline_s: float,
    ) -> None:
        self.op = op
        self.call = call
        self.group = group
        self.peer = peer
        self.stream: Hashable = group if peer is None else (group, op, peer, tag)
        self.num_bytes = num_bytes
        self.priority = priority
        self.submitted_s = submitted_s
        self.deadline_s = deadline_s
        """By when it must have started."""
        self.started_s = 0.0
        self.sequence = 0
        self.state = State.PENDING
        self.result: R
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.future: torch.futures.Future[R] = torch.futures.Future()

    def complete(self, error: BaseException | None = None) -> None:
        """Tell whoever waits. Not under the scheduler's lock: callbacks of the future run here."""
        self.error = error
        self.done.set()
        if error is None:
            self.future.set_result(self.result)
        else:
            # torch takes an Exception only; an interrupt in a worker thread ends the operation like any failure.
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self.future.set_exception(failure)  # type: ignore[arg-type]  # torch's stub says it takes a result


class ScheduledWork(Generic[R]):
    """The result of an operation that may not have begun yet."""

    def __init__(self, task: Task[R], cancel: Callable[[Task[R]], bool]) -> None:
        self._task = task
        self._cancel = cancel

    def wait(self, timeout_s: float | None = None) -> R:
        """The operation's result, or what it raised, as often as it is called.

        Without a limit of its own the wait ends with the task: by the deadline for its start, or by the
        operation's own deadline. OperationTimeout after `timeout_s` ends the waiting, not the task.
        """
        task = self._task
        if not task.done.wait(timeout_s):
            raise OperationTimeout(
                f"{task.op} was not done within the {timeout_s:g} s given to wait()",
                hint="the task goes on: wait again, or cancel it while it has not started",
                operation=task.op,
                group=task.group,
                has_started=task.state is State.RUNNING,
            )
        if task.error is not None:
            raise task.error
        return task.result

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._task.done.is_set()

    def exception(self) -> BaseException | None:
        """What went wrong, if the task is over and something did; waits for nothing."""
        return self._task.error

    def cancel(self) -> bool:
        """Take the task out of the queue; False if it has started or is over.

        The others of the group must cancel the same collective: they would wait for this rank.
        """
        return self._cancel(self._task)

    def get_future(self) -> torch.futures.Future[R]:
        """A torch future of the result, as DDP's hooks return it; its callbacks run in the thread that ran the task."""
        return self._task.future
